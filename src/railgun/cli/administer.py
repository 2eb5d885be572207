"""The commands that change what a node has: delete, purge, redrive, reset.

What cannot be taken back is asked for on a terminal, and needs `--yes` elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from railgun.broker.clock import time_of_day
from railgun.broker.settings import DEAD, SECOND
from railgun.broker.streams.retime import retime as mend_times
from railgun.cli.errors import DONE, FAILED, REFUSED, USAGE, CommandError
from railgun.cli.output import Output
from railgun.cli.streams import talk
from railgun.client.client import Client
from railgun.errors import RailgunError, said
from railgun.transport.registry import Registry


def confirm(options: argparse.Namespace, out: Output, what: str) -> None:
    """Go on only if somebody wants it."""
    if options.yes:
        return
    if out.as_json or not sys.stdin.isatty():
        raise CommandError(
            USAGE, "not-confirmed", f"{what}: that cannot be taken back; say --yes if it is meant"
        )
    out.console.print(f"{what}? That cannot be taken back. [y/N] ", end="", markup=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(FAILED, "declined", "nothing was done")


def remove_stream(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Delete a stream."""
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
    """Take messages out of a stream."""
    return _purge(options, out, options.name)


def purge_letters(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Take dead letters away."""
    return _purge(options, out, options.stream + DEAD)


def _purge(options: argparse.Namespace, out: Output, name: str) -> int:
    some = "all messages" if options.before is None else f"all messages before {options.before}"
    confirm(options, out, f"take {some} out of {name}")

    async def work(client: Client) -> int:
        done = await client.purge(name, options.before)
        out.data(stream=name, **done)
        count = done["purged"]
        out.line(f"{name}: {count:,} message{'s' * (count != 1)} gone, begins at {done['first']:,}")
        return DONE

    return talk(options, work)


def redrive(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Deliver dead letters again, to the groups that gave them up; return `REFUSED` if some cannot be."""

    async def work(client: Client) -> int:
        done = await client.redrive(
            options.stream, options.offset, options.count, timeout=options.timeout
        )
        out.data(stream=options.stream, **done)
        again = f", {done['already']:,} were there already" if done["already"] else ""
        out.line(f"{options.stream}: {done['redriven']:,} redriven{again}, {done['left']:,} left")
        for one in done["refused"]:
            out.line(f"  letter {one['offset']:,} cannot be redriven: {one['code']}: {one['text']}")
        return REFUSED if done["refused"] else DONE

    return talk(options, work)


def reset_group(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Let a group begin anew."""
    where = options.to if isinstance(options.to, str) else f"offset {options.to}"
    confirm(options, out, f"let the group {options.group} of {options.stream} go to {where}")

    async def work(client: Client) -> int:
        position = await client.reset_group(options.stream, options.group, options.to)
        out.data(stream=options.stream, group=options.group, position=position)
        out.line(f"{options.group}: goes on at {position:,}")
        return DONE

    return talk(options, work)


def remove_group(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Forget a group."""
    confirm(options, out, f"forget the group {options.group} of {options.stream}")

    async def work(client: Client) -> int:
        await client.delete_group(options.stream, options.group)
        out.data(stream=options.stream, deleted=options.group)
        out.line(f"{options.group}: deleted")
        return DONE

    return talk(options, work)


def retime(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Mend stored times that are ahead, in the directory of a node that is stopped."""
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
