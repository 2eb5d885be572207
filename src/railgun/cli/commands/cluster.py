"""`railgun cluster`: show a cluster, and manage its nodes, masters and settings."""

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

WATCH_INTERVAL_S: Final = 1.0
"""Time between two updates of `--watch`."""
_MARGIN_S: Final = 10.0
"""Time that a node gets to answer beyond the time it may wait itself."""
_RETRY_PAUSE_S: Final = 0.2
"""Time until a node that does not answer is tried again."""


def status(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Show the status of the cluster; with `--watch` again and again."""

    async def work(client: Client) -> int:
        if options.watch:
            await _watch(client, options, out)
        cluster = await _cluster_status(client)
        while options.wait and not _is_settled(cluster, options) and time.monotonic() < deadline:
            await asyncio.sleep(_RETRY_PAUSE_S)
            cluster = await _cluster_status(client)
        out.data(cluster=cluster)
        out.show(view.status(cluster))
        if options.wait and not _is_settled(cluster, options):
            return FAILED
        return FAILED if options.check and cluster["alarms"] else DONE

    if options.watch and (options.check or options.wait):
        raise CommandError(
            USAGE, "usage", "--watch never ends, so it does not go with --check or --wait"
        )
    deadline = time.monotonic() + (options.wait or 0.0)
    while True:
        try:
            return talk(options, work)
        except CommandError as error:  # the node may still be about to start
            if error.code != NO_NODE or time.monotonic() + _RETRY_PAUSE_S >= deadline:
                raise
        time.sleep(_RETRY_PAUSE_S)


def _is_settled(cluster: dict[str, Any], options: argparse.Namespace) -> bool:
    """Return whether the cluster is settled, as the node of `--data` says: another node may answer in its place."""
    own = None if options.node is not None else _id_in(Path(options.data))
    return bool(cluster["settled"]) and own in (None, cluster["node"])


def _id_in(data: Path) -> str | None:
    """Return the id of the node whose data directory this is; None if it cannot be read."""
    try:
        return str(json.loads((data / "cluster" / "node.json").read_text("utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _cluster_status(client: Client) -> dict[str, Any]:
    """Return the status of the cluster. If the connection is lost on the way, ask again on the next one."""
    deadline = client.loop.time() + client.timeout
    while True:
        try:
            return dict(await client.admin("cluster"))
        except StreamsError as error:
            if error.code != "CONNECTION_LOST" or client.loop.time() > deadline:
                raise
        await asyncio.sleep(0.1)


async def _watch(client: Client, options: argparse.Namespace, out: Output) -> None:
    """Show the status again and again, until Ctrl-C; warn while no node answers."""
    from rich.live import Live

    with Live(console=out.console, auto_refresh=False) as live:
        while True:
            try:
                cluster = await client.admin("cluster", timeout=5 * WATCH_INTERVAL_S)
                out.data(cluster=cluster)
                if not out.as_json:
                    live.update(view.status(cluster), refresh=True)
            except StreamsError as error:
                out.warn(f"no answer: {said(error)}")
            await asyncio.sleep(options.every)


def nodes(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """List the nodes of the cluster."""

    async def work(client: Client) -> int:
        members = (await _cluster_status(client))["nodes"]
        out.listing("nodes", members, view.nodes, "this node is not a member of a cluster yet")
        return DONE

    return talk(options, work)


def join(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Make a node join the cluster at an address; wait until it is a member."""

    async def work(client: Client) -> int:
        done = await client.admin(
            "join", options.wait + _MARGIN_S, address=options.address, wait=options.wait
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
    """Remove a node from the cluster; wait until it has left."""
    confirm(options, out, f"remove the node {options.name} from the cluster, with its replicas")

    async def work(client: Client) -> int:
        done = await client.admin(
            "remove_node", options.wait + _MARGIN_S, node=options.name, wait=options.wait
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
            f"{options.name} is still a member after {options.wait:g} s: {done['why']}. It continues to leave; "
            f"railgun cluster keep {options.name} cancels that",
        )

    return talk(options, work)


def keep(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Cancel the removal of a node."""

    async def work(client: Client) -> int:
        done = await client.admin("keep_node", node=options.name)
        out.data(node=options.name, **done)
        out.line(f"{options.name}: stays")
        return DONE

    return talk(options, work)


def transfer(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Make a node the master of a region or the leader; wait until it serves."""
    if (options.region is None) == (not options.leader):
        raise CommandError(USAGE, "usage", "say which: --region REGION, or --leader")

    async def work(client: Client) -> int:
        region = {} if options.leader else {"region": options.region}
        done = await client.admin("transfer", node=options.name, **region)
        what = "leads" if options.leader else f"is the master of {options.region}"

        def is_so(cluster: dict[str, Any], node: str) -> bool:
            if options.leader:
                return bool(cluster["leader"] == node)
            return any(
                region_data["name"] == options.region
                and region_data["master"] == node
                and region_data["acting"]
                for region_data in cluster["regions"]
            )

        if not await _wait_until(client, options.name, is_so):
            raise CommandError(
                FAILED, "not-moved", f"{options.name} was chosen, and does not serve yet"
            )
        out.data(node=options.name, **done)
        out.line(f"{options.name}: {what}")
        return DONE

    return talk(options, work)


async def _wait_until(
    client: Client, name: str, is_so: Callable[[dict[str, Any], str], bool]
) -> bool:
    """Poll the status until `is_so(status, node id)` holds; return False if it does not within `_MARGIN_S`."""
    deadline = client.loop.time() + _MARGIN_S
    while client.loop.time() < deadline:
        cluster = await _cluster_status(client)
        node = next(
            (member["id"] for member in cluster["nodes"] if name in (member["name"], member["id"])),
            name,
        )
        if is_so(cluster, node):
            return True
        await asyncio.sleep(0.1)
    return False


def settings(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Show the settings of the cluster, after changing those that are given."""
    change = dict(_setting(argument) for argument in options.change)

    async def work(client: Client) -> int:
        done = await client.admin("cluster_settings", change=change)
        out.data(**done)
        out.show(view.settings(done["settings"], change))
        return DONE

    return talk(options, work)


def _setting(typed: str) -> tuple[str, float | int | None]:
    """Parse a setting: `KEY=SECONDS` or `KEY=none`.

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
        problem = f"{key} is a number of seconds, or none: not {value!r}"
        raise CommandError(USAGE, "usage", problem) from None
    return key, int(number) if number.is_integer() else number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands `status`, `nodes`, `join`, `remove`, `keep`, `transfer` and `settings`."""
    commands = Subcommands(parser)
    command = commands.add("status", status, "show the nodes, regions and alarms of the cluster")
    command.add_argument(
        "--watch", action="store_true", help="keep showing the status until Ctrl-C"
    )
    command.add_argument(
        "--every", type=seconds, default=WATCH_INTERVAL_S, metavar="SECONDS",
        help="with --watch: time between updates (default: 1)",
    )  # fmt: skip
    command.add_argument(
        "--check", action="store_true", help="exit with code 1 if there is an alarm"
    )
    command.add_argument(
        "--wait", type=wait_seconds, metavar="SECONDS",
        help="wait until all nodes answer and all replicas have caught up; exit with code 1 after SECONDS",
    )  # fmt: skip
    add_node(command)

    add_node(commands.add("nodes", nodes, "list the nodes with their addresses"))

    command = commands.add("join", join, "make a node that is in no cluster join one")
    command.add_argument(
        "address", metavar="HOST:PORT", help="address for nodes (cluster_port) of a member"
    )
    command.add_argument(
        "--wait", type=wait_seconds, default=10.0, metavar="SECONDS",
        help="how long to wait until the node is a member (default: 10)",
    )  # fmt: skip
    add_node(command)

    command = commands.add("remove", remove, "remove a node from the cluster for good")
    command.add_argument("name", metavar="NODE", help="name or ID of the node")
    command.add_argument(
        "--wait", type=wait_seconds, default=60.0, metavar="SECONDS",
        help="how long to wait until the node is removed; 0: do not wait (default: 60)",
    )  # fmt: skip
    add_confirmation(command)
    add_node(command)

    command = commands.add("keep", keep, "cancel the removal of a node")
    command.add_argument("name", metavar="NODE", help="name or ID of the node")
    add_node(command)

    command = commands.add(
        "transfer", transfer, "make a node the master of a region, or the leader"
    )
    command.add_argument("name", metavar="NODE", help="name or ID of the node")
    command.add_argument("--region", metavar="REGION", help="make the node master of this region")
    command.add_argument(
        "--leader", action="store_true", help="make the node the leader of the cluster"
    )
    add_node(command)

    command = commands.add("settings", settings, "show or change the settings of the cluster")
    command.add_argument(
        "change", metavar="KEY=VALUE", nargs="*", help="setting to change: seconds, or none"
    )
    add_node(command)
