"""`railgun pub`: publish messages, or the lines of standard input."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from typing import Any, Final

from railgun.cli.arguments import add_node, add_stream, not_empty
from railgun.cli.errors import DONE, USAGE, CommandError
from railgun.cli.node import command_error, talk
from railgun.cli.output import Output
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.transport.registry import Registry

CHUNK_BYTES: Final = 1 << 18
MAX_UNDER_WAY: Final = 16
"""Maximum number of publishes that wait for acknowledgement, and of chunks of input that wait to be published."""


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Publish the messages that are given, or else the lines of standard input."""
    stream: str = options.stream
    if options.id is not None and len(options.messages) != 1:
        raise CommandError(USAGE, "usage", "an ID is for one message: give one, as MESSAGE")

    async def work(client: Client) -> int:
        description = await client.describe(stream)
        ephemeral = description["settings"]["kind"] == "ephemeral"
        count, first, last = 0, None, None
        try:
            async for offsets in _published(client, options):
                count += len(offsets)
                if offsets and not ephemeral and options.acks != "none":
                    first, last = offsets[0] if first is None else first, offsets[-1]
                elif offsets and ephemeral:
                    last = offsets[-1]
        except StreamsError as error:
            raise command_error(error, published=count) from error
        words = f"{stream}: {count:,} message{'s' * (count != 1)}"
        if ephemeral:
            out.data(published=count, matched=last)
            out.line(words + (f", {last:,} listening" if last is not None else ""))
        else:
            out.data(published=count, first=first, last=last)
            where = "" if first is None else f", offset {first}"
            out.line(words + where + (f" to {last}" if first != last else ""))
        return DONE

    return talk(options, work)


async def _published(client: Client, options: argparse.Namespace) -> AsyncIterator[list[int]]:
    stream, fields = options.stream, {"topic": options.topic or "", "acks": options.acks}
    if options.id is not None:
        [message] = options.messages
        yield [await client.publish(stream, message, id=options.id, **fields)]
        return
    if options.messages:
        yield await client.publish_many(stream, options.messages, **fields)
        return
    under_way: deque[asyncio.Task[list[int]]] = deque()
    try:
        async for lines in _lines():
            task = client.loop.create_task(client.publish_many(stream, lines, **fields))
            under_way.append(task)
            await asyncio.sleep(0)  # the tasks start in this order
            while under_way and (len(under_way) > MAX_UNDER_WAY or under_way[0].done()):
                yield await under_way.popleft()
        while under_way:
            yield await under_way.popleft()
    except StreamsError:
        for done in await asyncio.gather(*under_way, return_exceptions=True):
            if isinstance(done, list):
                yield done
        raise


async def _lines() -> AsyncIterator[list[bytes]]:
    """Yield the lines of standard input, in lists of as many as have arrived."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes] = asyncio.Queue(MAX_UNDER_WAY)

    def read() -> None:  # in a thread of its own, which may block for ever
        file = sys.stdin.fileno()
        with contextlib.suppress(RuntimeError, CancelledError):  # the event loop has ended
            while data := os.read(file, CHUNK_BYTES):
                asyncio.run_coroutine_threadsafe(arrived.put(data), loop).result()
            asyncio.run_coroutine_threadsafe(arrived.put(b""), loop).result()

    threading.Thread(target=read, daemon=True).start()
    begun: list[bytes] = []  # parts of the last line, which has no end yet
    while data := await arrived.get():
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*begun, whole[0]])
            begun = []
            yield whole
        if rest:
            begun.append(rest)
    if begun:
        yield [b"".join(begun)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the stream, the messages and the options."""
    add_stream(parser)
    parser.add_argument(
        "messages", metavar="MESSAGE", nargs="*",
        help="messages to publish (default: each line of standard input)",
    )  # fmt: skip
    parser.add_argument(
        "--id", help="ID of the message: it is stored once within the deduplication window"
    )
    parser.add_argument(
        "--topic",
        type=not_empty,
        default=None,
        help="topic of the messages, on an ephemeral stream",
    )
    parser.add_argument(
        "--acks", choices=("quorum", "master", "all", "none"), default="quorum",
        help="acknowledge after fsync on: quorum, master, all, none (default: quorum)",
    )  # fmt: skip
    add_node(parser)
    _allow_options_between_messages(parser)


def _allow_options_between_messages(parser: Any) -> None:
    """Let options stand between messages, where argparse would end the list of messages."""
    parse_known_args = parser.parse_known_args

    def parse(words: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = parse_known_args
        try:
            return parser.parse_known_intermixed_args(words, namespace)
        finally:
            parser.parse_known_args = parse

    parser.parse_known_args = parse
