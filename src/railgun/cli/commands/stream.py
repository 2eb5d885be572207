"""`railgun stream`: create, list, change, purge and delete streams."""

from __future__ import annotations

import argparse
import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from railgun.broker.clock import time_of_day
from railgun.broker.protocol.metadata.fields import difference
from railgun.broker.settings import SECOND, StreamSettings
from railgun.broker.streams.retime import retime as mend_times
from railgun.cli import stream_view as view
from railgun.cli.arguments import (
    add_confirmation,
    add_node,
    number,
    or_none,
    positive,
    seconds,
    timestamp,
)
from railgun.cli.errors import DONE, FAILED, CommandError
from railgun.cli.node import confirm, purge, talk
from railgun.cli.output import Output
from railgun.cli.parsing import Subcommands
from railgun.client.client import Client
from railgun.errors import RailgunError, said
from railgun.transport.registry import Registry

FIXED: Final = ("kind", "region")
"""Settings of a stream that cannot be changed."""
SETTINGS: Final = tuple(field.name for field in dataclasses.fields(StreamSettings))


def ensure(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Create a stream, or check and change its settings."""
    names = (*SETTINGS, "region")
    settings = {name: getattr(options, name) for name in names if hasattr(options, name)}

    async def work(client: Client) -> int:
        done = await client.ensure(options.name, options.mode, **settings)
        out.data(stream=options.name, **done)
        result = done["result"]
        labels = {"CREATED": "made", "UNCHANGED": "is so already", "UPDATED": "changed"}
        if result in labels:
            out.line(f"{options.name}: {labels[result]}")
        for name, values in done["differs"].items():
            if result == "DIFFERS":
                stays = "it stays so" if name in FIXED else "--mode overwrite changes it"
                text = f"{options.name}: {difference({name: values})}; {stays}"
                out.line(text, "yellow")
            else:
                both = (values["is"], values["asked"])
                out.line(f"  {name}: {' → '.join('none' if v is None else str(v) for v in both)}")
        return DONE

    return talk(options, work)


def streams(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """List the streams; internal ones only with `--all`."""

    async def work(client: Client) -> int:
        listing = await client.streams()
        if not options.all:
            listing = [stream for stream in listing if not stream["name"].startswith("_")]
        out.listing("streams", listing, view.streams, "there are no streams yet")
        return DONE

    return talk(options, work)


def info(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Show the settings and the extent of a stream."""

    async def work(client: Client) -> int:
        description = await client.describe(options.name)
        out.data(stream=description)
        out.show(view.stream(description))
        return DONE

    return talk(options, work)


def remove_stream(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Delete a stream with all its messages, after confirmation."""
    also = " and its dead letters" if options.dead_letters else ""
    confirm(options, out, f"delete the stream {options.name}{also}")

    async def work(client: Client) -> int:
        gone = await client.delete(options.name, dead_letters=options.dead_letters)
        out.data(deleted=gone)
        for name in gone:
            out.line(f"{name}: deleted")
        return DONE

    return talk(options, work)


def purge_stream(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Delete messages of a stream, all or those before an offset."""
    return purge(options, out, options.name)


def retime(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Correct stored times that are in the future, in the data directory of a stopped node."""
    latest = time_of_day() if options.latest is None else options.latest
    when = datetime.fromtimestamp(latest / SECOND, UTC).isoformat()
    what = ", ".join(options.names) or "all streams"
    confirm(options, out, f"{options.data}: set all times after {when} to it ({what})")
    try:
        changed = mend_times(
            Path(options.data), latest, options.names, may_expire=options.may_expire
        )
    except RailgunError as error:
        code = str(getattr(error, "code", "FAILED"))
        raise CommandError(FAILED, code.lower().replace("_", "-"), str(error)) from error
    except OSError as error:
        raise CommandError(FAILED, "disk", f"{options.data}: {said(error)}") from error
    out.data(latest=when, changed=changed)
    for name, count in changed.items():
        out.line(f"{name}: {count:,} batches changed")
    return DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands `ensure`, `ls`, `info`, `rm`, `purge` and `retime`."""
    commands = Subcommands(parser)
    command = commands.add("ensure", ensure, "create a stream, or check and change its settings")
    command.add_argument("name", metavar="STREAM", help="name of the stream")
    _add_settings(command)
    command.add_argument(
        "--region", metavar="REGION", default=argparse.SUPPRESS,
        help="region of the cluster that keeps the stream (default: global)",
    )  # fmt: skip
    command.add_argument(
        "--mode", choices=("warn", "overwrite", "strict"), default="warn",
        help="if the stream has other settings: warn, change them (overwrite), or fail (strict) (default: warn)",
    )  # fmt: skip
    add_node(command)

    command = commands.add("ls", streams, "list the streams")
    command.add_argument(
        "--all", action="store_true", help="include internal streams, whose names begin with _"
    )
    add_node(command)

    command = commands.add("info", info, "show the settings and the extent of a stream")
    command.add_argument("name", metavar="STREAM", help="name of the stream")
    add_node(command)

    command = commands.add("rm", remove_stream, "delete a stream with all its messages")
    command.add_argument("name", metavar="STREAM", help="name of the stream")
    command.add_argument("--dead-letters", action="store_true", help="delete its dead letters, too")
    add_confirmation(command)
    add_node(command)

    command = commands.add("purge", purge_stream, "delete messages of a stream")
    command.add_argument("name", metavar="STREAM", help="name of the stream")
    command.add_argument(
        "--before", type=number, metavar="OFFSET",
        help="delete only messages before this offset (default: all messages)",
    )  # fmt: skip
    add_confirmation(command)
    add_node(command)

    command = commands.add(
        "retime", retime, "correct stored times that are in the future, while the node is stopped"
    )
    command.add_argument(
        "names", metavar="STREAM", nargs="*", help="streams to correct (default: all streams)"
    )
    command.add_argument(
        "--latest", type=timestamp, metavar="TIME",
        help="set later times to this one, such as 2026-05-17T12:00:00+00:00; use the same on all nodes of a "
        "cluster (default: now)",
    )  # fmt: skip
    command.add_argument(
        "--may-expire", action="store_true",
        help="proceed even if retention (--max-age) then deletes messages at once (default: refuse)",
    )  # fmt: skip
    add_confirmation(command)
    add_node(command)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings of a stream. Those that are not given keep their values, or get the defaults."""
    parser.add_argument(
        "--ephemeral", dest="kind", action="store_const", const="ephemeral", default=argparse.SUPPRESS,
        help="ephemeral stream: messages are delivered to current subscribers and never stored",
    )  # fmt: skip
    for flag, kind, metavar, help_text in (
        ("--max-age", or_none(seconds), "SECONDS", "retention by age, or none (default: none)"),
        ("--max-bytes", or_none(number), "BYTES", "retention by size, or none (default: none)"),
        ("--id-box", seconds, "SECONDS", "deduplication window for message IDs (default: 120)"),
        ("--max-ids", positive, "N", "maximum number of IDs in the deduplication window (default: 1000000)"),
        ("--max-staged", positive, "BYTES", "maximum size of data that producers have staged and not "
         "committed (default: 8589934592, 8 GiB)"),
        ("--dead-distance", or_none(number), "N", "dead-letter a message that failed once a message more than N "
         "offsets later is acknowledged, or after more than N failures; or none (default: none)"),
        ("--dead-deliveries", or_none(number), "N", "dead-letter a message that failed N times (nacked, or its "
         "consumer died); or none (default: none)"),
        ("--dead-age", or_none(seconds), "SECONDS", "dead-letter a message that failed this long after its first "
         "delivery to the group; or none (default: none)"),
    ):  # fmt: skip
        parser.add_argument(
            flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=help_text
        )
    parser.add_argument(
        "--duplicates", choices=("ok", "refuse"), default=argparse.SUPPRESS,
        help="answer to a publisher whose ID is already stored: ok, or refuse with an error (default: refuse)",
    )  # fmt: skip
