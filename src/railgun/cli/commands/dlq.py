"""`railgun dlq`: list, show, redrive and purge the dead letters of a stream."""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable

from railgun.broker.settings import DEAD, REDRIVE
from railgun.cli import stream_view as view
from railgun.cli.arguments import add_confirmation, add_node, add_stream, number, positive, seconds
from railgun.cli.errors import DONE, REFUSED
from railgun.cli.messages import as_data, messages_of
from railgun.cli.node import purge, talk
from railgun.cli.output import Output
from railgun.cli.parsing import Subcommands
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.client.message import Message
from railgun.transport.registry import Registry


def dead_letters(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """List the dead letters of a stream."""

    async def work(client: Client) -> int:
        letters = [
            {"letter": message.offset, "buried": message.time / 1e6}
            | view.headers_of(message.headers)
            | {"redriven": redriven}
            async for message, redriven in _letters(client, options, out)
        ]
        out.listing("letters", letters, view.letters, f"{options.stream} has no dead letters")
        return DONE

    return talk(options, work)


def show_dead_letters(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Print dead letters with their headers and payloads."""

    async def work(client: Client) -> int:
        count = 0
        async for message, redriven in _letters(client, options, out):
            count += 1
            headers = view.headers_of(message.headers)
            out.data(**as_data(message) | {"headers": headers, "redriven": redriven})
            out.line(view.letter(message.offset, headers, redriven), "bold")
            out.raw(message.payload + b"\n")
            if count == options.count:
                break
        if not count:
            out.line(f"{options.stream} has no dead letters")
        return DONE

    return talk(options, work)


async def _letters(
    client: Client, options: argparse.Namespace, out: Output
) -> AsyncIterator[tuple[Message, bool]]:
    """Yield dead letters, and whether each was redriven; redriven ones only with `--all`."""
    stream: str = options.stream
    await client.describe(stream)  # raises if the stream does not exist
    try:
        redriven = await _redriven(client, stream + DEAD)
        subscription = await client.subscribe(stream + DEAD)
    except StreamsError as error:
        if error.code == "NO_STREAM":  # no message was dead-lettered yet
            return
        raise
    async with subscription:
        async for messages in messages_of(client, subscription, out, None, follow=False):
            for message in messages:
                gone = redriven(message.offset)
                if options.all or not gone:
                    yield message, gone


async def _redriven(client: Client, letters: str) -> Callable[[int], bool]:
    """Return a function that says whether the dead letter at an offset was redriven."""
    try:
        finished = await client.admin("finished", name=letters, group=REDRIVE)
    except StreamsError as error:
        if error.code != "NO_GROUP":
            raise
        return lambda offset: False
    ends = [(0, finished["floor"]), *map(tuple, finished["ranges"])]
    firsts = [first for first, _ in ends]
    return lambda offset: offset < ends[bisect_right(firsts, offset) - 1][1]


def redrive(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Deliver dead letters again, to the groups that gave them up; return `REFUSED` if some cannot be."""

    async def work(client: Client) -> int:
        done = await client.redrive(
            options.stream, options.offset, options.count, timeout=options.timeout
        )
        out.data(stream=options.stream, **done)
        again = f", {done['already']:,} were there already" if done["already"] else ""
        out.line(f"{options.stream}: {done['redriven']:,} redriven{again}, {done['left']:,} left")
        for letter in done["refused"]:
            out.line(
                f"  letter {letter['offset']:,} cannot be redriven: {letter['code']}: {letter['text']}"
            )
        return REFUSED if done["refused"] else DONE

    return talk(options, work)


def purge_letters(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Delete dead letters, all or those before an offset."""
    return purge(options, out, options.stream + DEAD)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands `ls`, `show`, `redrive` and `purge`."""
    commands = Subcommands(parser)
    command = commands.add("ls", dead_letters, "list dead letters with the reasons")
    add_stream(command)
    _add_all(command)
    add_node(command)

    command = commands.add("show", show_dead_letters, "print dead letters with their payloads")
    add_stream(command)
    _add_all(command)
    command.add_argument(
        "--count", type=positive, metavar="N", help="print the N oldest (default: all)"
    )
    add_node(command)

    command = commands.add(
        "redrive", redrive, "deliver dead letters again, to the groups that gave them up"
    )
    add_stream(command)
    command.add_argument(
        "--offset", type=number, action="append", metavar="LETTER",
        help="redrive the dead letter with this offset; may be repeated (default: all)",
    )  # fmt: skip
    command.add_argument(
        "--count", type=positive, metavar="N", help="redrive at most N (default: all)"
    )
    command.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="SECONDS",
        help="how long to wait for the node (default: 600)",
    )  # fmt: skip
    add_node(command)

    command = commands.add("purge", purge_letters, "delete dead letters")
    add_stream(command)
    command.add_argument(
        "--before", type=number, metavar="LETTER",
        help="delete only those before this offset (default: all)",
    )  # fmt: skip
    add_confirmation(command)
    add_node(command)


def _add_all(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all", action="store_true", help="include dead letters that were redriven"
    )
