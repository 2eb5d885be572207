"""`railgun sub`: print the messages of a stream."""

from __future__ import annotations

import argparse
import asyncio
import contextlib

from railgun.cli.arguments import add_node, add_stream, not_empty, positive, start_position
from railgun.cli.errors import DONE, USAGE, CommandError
from railgun.cli.messages import as_data, flush, messages_of
from railgun.cli.node import CONNECT_TIMEOUT_S, stoppable, talk
from railgun.cli.output import Output
from railgun.client.checks import LEFT_OUT
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.transport.registry import Registry


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Print messages; as a member of a group, acknowledge those that are printed."""
    if options.exclusive and not options.group:
        raise CommandError(USAGE, "usage", "--exclusive is for the members of a --group")
    if options.consumer and options.group:
        raise CommandError(USAGE, "usage", "--consumer is for a consumer without a --group")

    async def work(client: Client) -> int:
        return await stoppable(_print(client, options, out))

    return talk(options, work)


async def _print(client: Client, options: argparse.Namespace, out: Output) -> int:
    prefetch = min(1000, options.count or 1000)
    subscription = await client.subscribe(
        options.stream, group=options.group or LEFT_OUT, exclusive=options.exclusive,
        consumer=options.consumer or LEFT_OUT, start=options.start, matcher=options.matcher, prefetch=prefetch,
    )  # fmt: skip
    async with subscription:
        follow = options.follow
        if not subscription.persistent:
            if follow is False:
                raise CommandError(USAGE, "usage", f"{options.stream} is ephemeral: it has no end")
            follow = True
        acked = bool(subscription.group) and subscription.persistent
        warning: asyncio.Task[None] | None = None
        if follow and subscription.persistent and not subscription.group:
            warning = asyncio.create_task(_warn_of_copy(client, options.stream, out))
        try:
            async for messages in messages_of(
                client, subscription, out, options.count, bool(follow)
            ):
                if out.as_json:
                    for message in messages:
                        out.data(**as_data(message))
                else:
                    out.raw(b"".join([message.payload + b"\n" for message in messages]))
                if acked:
                    subscription.ack_all(messages)
            if warning is not None:
                await asyncio.wait([warning], timeout=CONNECT_TIMEOUT_S)
        finally:
            if warning is not None:
                warning.cancel()
            if acked:
                await flush(subscription, CONNECT_TIMEOUT_S)
        for count, what in (
            (subscription.missed, "deleted before they could be delivered"),
            (subscription.lost, "lost: they came faster than they were taken"),
        ):
            if count:
                out.warn(f"{count:,} messages were {what}", messages=count)
    return DONE


async def _warn_of_copy(client: Client, stream: str, out: Output) -> None:
    """Warn a follower of a stream if a replica that may be out of date has described the stream."""
    with contextlib.suppress(StreamsError):  # reading the stream reports the error
        description = await client.describe(stream)
        if description.get("from_copy"):
            out.warn(f"the end of {stream} is {description['from_copy']}", end=description["end"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the stream and the options."""
    add_stream(parser)
    parser.add_argument(
        "--group", type=not_empty, default=None,
        help="join this consumer group: share messages with its members, and acknowledge those printed",
    )  # fmt: skip
    parser.add_argument(
        "--exclusive", action="store_true",
        help="exclusive group: one member at a time receives messages, in order",
    )  # fmt: skip
    parser.add_argument(
        "--consumer", type=not_empty, default=None, metavar="ID",
        help="continue where the consumer with this ID was, and acknowledge messages printed; replaces a running one",
    )  # fmt: skip
    parser.add_argument(
        "--start", type=start_position, default="start", metavar="start|end|OFFSET",
        help="start here if the group or consumer has no position yet; an OFFSET moves it in any case (default: start)",
    )  # fmt: skip
    parser.add_argument(
        "--matcher", metavar="PATTERN",
        help="receive only topics that match, on an ephemeral stream: a.* (one word), a.# (any words)",
    )  # fmt: skip
    parser.add_argument("--count", type=positive, metavar="N", help="exit after N messages")
    parser.add_argument(
        "--follow", action=argparse.BooleanOptionalAction,
        help="wait for more messages at the end of the stream (default: exit; on an ephemeral stream: wait)",
    )  # fmt: skip
    add_node(parser)
