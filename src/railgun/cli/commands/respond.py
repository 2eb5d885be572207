"""`railgun respond`: answer the requests of an ephemeral stream."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import shutil
from typing import Final

from railgun.cli.arguments import add_node, add_stream, not_empty, positive
from railgun.cli.errors import DONE, FAILED, USAGE, CommandError
from railgun.cli.messages import as_data
from railgun.cli.node import stoppable, talk
from railgun.cli.output import Output
from railgun.client.checks import LEFT_OUT
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.client.message import Message
from railgun.errors import said
from railgun.transport.registry import Registry

MAX_COMMANDS: Final = 16
"""Maximum number of commands that run at the same time, one for each request."""


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Answer requests with a text, or with the output of a command."""
    words: list[str] = []
    if options.program is not None:
        try:
            words = shlex.split(options.program)
        except ValueError as error:
            raise CommandError(
                USAGE, "usage", f"--command {options.program!r}: {said(error)}"
            ) from error
        if not words or shutil.which(words[0]) is None:
            raise CommandError(USAGE, "usage", f"there is no command {' '.join(words[:1])!r}")

    async def work(client: Client) -> int:
        return await stoppable(_respond(client, options, words, out))

    return talk(options, work)


async def _respond(
    client: Client, options: argparse.Namespace, words: list[str], out: Output
) -> int:
    subscription = await client.subscribe(
        options.stream, group=options.group or LEFT_OUT, matcher=options.matcher
    )
    tasks: set[asyncio.Task[None]] = set()
    async with subscription:
        if subscription.persistent:
            raise StreamsError(
                "NOT_EPHEMERAL", f"stream {options.stream!r} is persistent: it has no requests"
            )
        out.data(answering=options.stream)
        out.line(f"answering the requests of {options.stream}; Ctrl-C stops", "green")
        free = asyncio.Semaphore(MAX_COMMANDS)
        left = options.count

        async def answer(message: Message) -> None:
            try:
                response = await _output_of(message.payload, words) if words else options.text
                await message.respond(response)
                out.data(answered=True, **as_data(message))
            except (StreamsError, CommandError, OSError) as error:
                out.warn(f"a request is not answered: {said(error)}")
            finally:
                free.release()

        try:
            async for message in subscription:
                if not message.response:
                    continue  # a message that asks for no response
                await free.acquire()
                task = client.loop.create_task(answer(message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                left = left and left - 1
                if left == 0:
                    break
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return DONE


async def _output_of(payload: bytes, words: list[str]) -> bytes:
    """Run a command on a request; return its output, without the end of the last line."""
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        answer, _ = await process.communicate(payload)
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise CommandError(
            FAILED, "command", f"the command ended with exit code {process.returncode}"
        )
    return answer.removesuffix(b"\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the stream, the answer and the options."""
    add_stream(parser)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--command", dest="program", metavar="COMMAND",
        help="run this for each request, with the request on standard input; its output is the response",
    )  # fmt: skip
    how.add_argument("--text", help="send this response to every request")
    parser.add_argument(
        "--group", type=not_empty, default=None,
        help="join this group: each request goes to one of its members",
    )  # fmt: skip
    parser.add_argument(
        "--matcher", metavar="PATTERN",
        help="answer only requests whose topics match: a.* (one word), a.# (any words)",
    )  # fmt: skip
    parser.add_argument("--count", type=positive, metavar="N", help="exit after N requests")
    add_node(parser)
