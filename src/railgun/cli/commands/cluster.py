"""The commands about a cluster: how it is, and what is to become of its nodes and masters."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from railgun.cli import cluster_view as view
from railgun.cli.arguments import add_confirmation, add_node, seconds, wait_seconds
from railgun.cli.errors import DONE, FAILED, NO_NODE, USAGE, CommandError
from railgun.cli.node import confirm, talk
from railgun.cli.output import Output
from railgun.cli.parsing import Subcommands
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.errors import said
from railgun.transport.registry import Registry

EVERY: Final = 1.0  # seconds between two looks
_MARGIN: Final = 10.0  # seconds more than a node may take
_AGAIN: Final = 0.2  # seconds until a node that is not there is looked for again


def status(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """How the cluster is."""

    async def work(client: Client) -> int:
        if options.watch:
            await _watch(client, options, out)
        found = await _look(client)
        while options.wait and not _is_settled(found, options) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            found = await _look(client)
        out.data(cluster=found)
        out.show(view.status(found))
        if options.wait and not _is_settled(found, options):
            return FAILED
        return FAILED if options.check and found["alarms"] else DONE

    if options.watch and (options.check or options.wait):
        raise CommandError(
            USAGE, "usage", "--watch never ends: it cannot be with --check or --wait"
        )
    deadline = time.monotonic() + (options.wait or 0.0)
    while True:
        try:
            return talk(options, work)
        except CommandError as error:  # the node may still be about to start
            if error.code != NO_NODE or time.monotonic() + _AGAIN >= deadline:
                raise
        time.sleep(_AGAIN)


def _is_settled(found: dict[str, Any], options: argparse.Namespace) -> bool:
    """Return whether all is well, as the node of `--data` says itself: another one may answer in its place."""
    own = None if options.node is not None else _id_in(Path(options.data))
    return bool(found["settled"]) and own in (None, found["node"])


def _id_in(data: Path) -> str | None:
    """Return the id of the node that works in a directory; None if that is not known."""
    try:
        return str(json.loads((data / "cluster" / "node.json").read_text("utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _look(client: Client) -> dict[str, Any]:
    """How the cluster is. A connection that is lost on the way does no harm: it is asked again, on the next one."""
    deadline = client.loop.time() + client.timeout
    while True:
        try:
            return dict(await client.admin("cluster"))
        except StreamsError as error:
            if error.code != "CONNECTION_LOST" or client.loop.time() > deadline:
                raise
        await asyncio.sleep(0.1)


async def _watch(client: Client, options: argparse.Namespace, out: Output) -> None:
    """Again and again, until Ctrl-C; a node that goes away is told, and looked for."""
    from rich.live import Live

    with Live(console=out.console, auto_refresh=False) as live:
        while True:
            try:
                found = await client.admin("cluster", timeout=5 * EVERY)
                out.data(cluster=found)
                if not out.as_json:
                    live.update(view.status(found), refresh=True)
            except StreamsError as error:
                out.warn(f"no answer: {said(error)}")
            await asyncio.sleep(options.every)


def nodes(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Which nodes there are."""

    async def work(client: Client) -> int:
        found = (await _look(client))["nodes"]
        out.listing("nodes", found, view.nodes, "this node is not a member of a cluster yet")
        return DONE

    return talk(options, work)


def join(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Tell a node where a cluster is."""

    async def work(client: Client) -> int:
        done = await client.admin(
            "join", options.wait + _MARGIN, address=options.address, wait=options.wait
        )
        out.data(**done)
        if done["result"] == "JOINED":
            out.line(f"a member of the cluster {done['cluster']} now")
            return DONE
        raise CommandError(
            FAILED,
            "not-joined",
            f"not a member yet after {options.wait:g} s, and still trying: {done['why'] or 'no answer'}",
        )

    return talk(options, work)


def remove(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Let a node leave."""
    confirm(options, out, f"let the node {options.name} leave the cluster, with its copies")

    async def work(client: Client) -> int:
        done = await client.admin(
            "remove_node", options.wait + _MARGIN, node=options.name, wait=options.wait
        )
        out.data(node=options.name, **done)
        if done["result"] == "REMOVED":
            out.line(f"{options.name}: no member any more; stop it, and remove its directory")
            return DONE
        if not options.wait:
            out.line(f"{options.name}: leaving; {done['why']}")
            return DONE
        raise CommandError(
            FAILED,
            "not-removed",
            f"{options.name} is still there after {options.wait:g} s: {done['why']}. It goes on leaving; "
            f"railgun cluster keep {options.name} takes that back",
        )

    return talk(options, work)


def keep(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Let a node stay."""

    async def work(client: Client) -> int:
        done = await client.admin("keep_node", node=options.name)
        out.data(node=options.name, **done)
        out.line(f"{options.name}: stays")
        return DONE

    return talk(options, work)


def transfer(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Let a node be the master of a region, or lead."""
    if (options.region is None) == (not options.leader):
        raise CommandError(USAGE, "usage", "say which: --region REGION, or --leader")

    async def work(client: Client) -> int:
        given = {} if options.leader else {"region": options.region}
        done = await client.admin("transfer", node=options.name, **given)
        what = "leads" if options.leader else f"is the master of {options.region}"

        def is_so(found: dict[str, Any], node: str) -> bool:
            if options.leader:
                return bool(found["leader"] == node)
            return any(
                one["name"] == options.region and one["master"] == node and one["acting"]
                for one in found["regions"]
            )

        if not await _until(client, options.name, is_so):
            raise CommandError(
                FAILED, "not-moved", f"{options.name} was chosen, and does not serve yet"
            )
        out.data(node=options.name, **done)
        out.line(f"{options.name}: {what}")
        return DONE

    return talk(options, work)


async def _until(client: Client, called: str, is_so: Callable[[dict[str, Any], str], bool]) -> bool:
    """Look until it is so, for a while."""
    deadline = client.loop.time() + _MARGIN
    while client.loop.time() < deadline:
        found = await _look(client)
        node = next(
            (one["id"] for one in found["nodes"] if called in (one["name"], one["id"])), called
        )
        if is_so(found, node):
            return True
        await asyncio.sleep(0.1)
    return False


def settings(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """What the cluster's settings are; change some."""
    change = dict(_setting(one) for one in options.change)

    async def work(client: Client) -> int:
        done = await client.admin("cluster_settings", change=change)
        out.data(**done)
        out.show(view.settings(done["settings"], change))
        return DONE

    return talk(options, work)


def _setting(typed: str) -> tuple[str, float | int | None]:
    """A setting as it is typed.

    >>> _setting("patience=2.5"), _setting("prune_after=none")
    (('patience', 2.5), ('prune_after', None))
    """
    key, sign, value = typed.partition("=")
    if not sign or not key:
        raise CommandError(USAGE, "usage", f"{typed!r}: write KEY=VALUE, as patience=2")
    if value == "none":
        return key, None
    try:
        number = float(value)
    except ValueError:
        told = f"{key} is a number of seconds, or none: not {value!r}"
        raise CommandError(USAGE, "usage", told) from None
    return key, int(number) if number.is_integer() else number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands `status`, `nodes`, `join`, `remove`, `keep`, `transfer` and `settings`."""
    commands = Subcommands(parser)
    made = commands.add("status", status, "show the nodes, regions and alarms of the cluster")
    made.add_argument("--watch", action="store_true", help="keep showing the status until Ctrl-C")
    made.add_argument(
        "--every", type=seconds, default=EVERY, metavar="SECONDS",
        help="with --watch: time between updates (default: 1)",
    )  # fmt: skip
    made.add_argument("--check", action="store_true", help="exit with code 1 if there is an alarm")
    made.add_argument(
        "--wait", type=wait_seconds, metavar="SECONDS",
        help="wait until all nodes answer and all replicas have caught up; exit with code 1 after SECONDS",
    )  # fmt: skip
    add_node(made)

    add_node(commands.add("nodes", nodes, "list the nodes with their addresses"))

    made = commands.add("join", join, "make a node that is in no cluster join one")
    made.add_argument(
        "address", metavar="HOST:PORT", help="address for nodes (cluster_port) of a member"
    )
    made.add_argument(
        "--wait", type=wait_seconds, default=10.0, metavar="SECONDS",
        help="how long to wait until the node is a member (default: 10)",
    )  # fmt: skip
    add_node(made)

    made = commands.add("remove", remove, "remove a node from the cluster for good")
    made.add_argument("name", metavar="NODE", help="name or ID of the node")
    made.add_argument(
        "--wait", type=wait_seconds, default=60.0, metavar="SECONDS",
        help="how long to wait until the node is removed; 0: do not wait (default: 60)",
    )  # fmt: skip
    add_confirmation(made)
    add_node(made)

    made = commands.add("keep", keep, "cancel the removal of a node")
    made.add_argument("name", metavar="NODE", help="name or ID of the node")
    add_node(made)

    made = commands.add("transfer", transfer, "make a node the master of a region, or the leader")
    made.add_argument("name", metavar="NODE", help="name or ID of the node")
    made.add_argument("--region", metavar="REGION", help="make the node master of this region")
    made.add_argument(
        "--leader", action="store_true", help="make the node the leader of the cluster"
    )
    add_node(made)

    made = commands.add("settings", settings, "show or change the settings of the cluster")
    made.add_argument(
        "change", metavar="KEY=VALUE", nargs="*", help="setting to change: seconds, or none"
    )
    add_node(made)
