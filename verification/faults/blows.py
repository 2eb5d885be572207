"""Apply faults to real nodes, and administer the cluster by its public interface."""

from __future__ import annotations

import asyncio
import errno
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.errors import RailgunError
from railgun.transport.proto.streams_pb2 import Publish
from railgun.transport.records import build
from verification.faults import damage
from verification.faults.history import CutOff, History
from verification.faults.nemesis import SETTLE, Admin, Blow, blocked
from verification.faults.nodes import NodeProcess, Nodes
from verification.faults.proxy import OTHERS, Mode
from verification.faults.shim import Orders

MODES: Final[dict[str, Mode]] = {"cut": "cut", "drop": "drop", "hold": "hold"}
DAMAGE: Final[dict[str, Callable[[Path, Random], str]]] = {
    "flip": damage.flip_bit,
    "flip_groups": damage.flip_group_bit,
    "cut_tail": damage.cut_tail,
    "remove_stream": damage.remove_stream,
}
ASK_S: Final = 20.0
"""Seconds that a node which is cut off has to answer; it has to be quicker, which the checker sees to."""
PROBE: Final = "probe"
"""The stream that is written to see whether a stream has a master, and which nodes have caught up."""


class RealStriker:
    """Apply faults to processes, links, disks and clocks."""

    def __init__(
        self, nodes: Nodes, admin: Admin, chance: Random, history: History | None = None
    ) -> None:
        self._nodes, self._admin, self._chance = nodes, admin, chance
        self._history = history
        self._partitions: list[Blow] = []

    async def begin(self, blow: Blow) -> str:
        """Apply `blow`; return notes for people."""
        if blow.kind == "rolling":
            return await self._restart_all(blow.others)
        note = ""
        for name in (*blow.victims, *blow.others):
            node = self._nodes[name]
            match blow.kind:
                case "kill":
                    await node.kill()
                case "torn_kill":
                    node.order(node.orders.but(torn=True))
                    await asyncio.sleep(0.3)  # until some writes are under way
                    await node.kill()
                case "pause" | "freeze":
                    node.pause()
                case "full_disk":
                    node.order(node.orders.but(full=True))
                case "refused_writes":
                    node.order(node.orders.but(refuse=getattr(errno, blow.style)))
                case "unwritable_master":
                    note = await self._ask(self._admin.lead(name))
                    node.order(node.orders.but(refuse=getattr(errno, blow.style)))
                case "failed_sync":
                    node.order(node.orders.but(fail_sync=True))
                case "slow_disk":
                    node.order(node.orders.but(slow_sync=blow.amount))
                case "clock":
                    node.order(node.orders.but(ahead=blow.amount))
                case "flip" | "flip_groups" | "cut_tail" | "remove_stream":
                    await node.kill()
                    note = DAMAGE[blow.kind](node.data, self._chance) or "there was nothing"
                case "member":
                    note = await self._ask(self._admin.remove(name))
                case "clients_cut":
                    self._nodes.links.set(OTHERS, name, "cut")
                case "slow_links":
                    for other in (*self._nodes.names, OTHERS):
                        self._nodes.links.slow(name, other, blow.amount, blow.amount)
                        self._nodes.links.slow(other, name, blow.amount, blow.amount)
        if any(blocked(blow, self._nodes.names)):
            self._partitions.append(blow)
            self._close_links()
        return note

    async def finish(self, blow: Blow) -> str:
        """Undo `blow`; return notes for people."""
        note = ""
        if blow.kind == "minority" and self._history is not None:
            for name in blow.victims:
                self._history.add(await ask_cut_off(self._nodes[name]))
        if blow in self._partitions:
            self._partitions.remove(blow)
            for a, b in blocked(blow, self._nodes.names):
                self._nodes.links.set(a, b, "open")
            self._close_links()  # partitions of other blows go on
        for name in (*blow.victims, *blow.others):
            node = self._nodes[name]
            match blow.kind:
                case "kill" | "torn_kill" | "flip" | "flip_groups" | "cut_tail" | "remove_stream":
                    node.order(node.orders.but(torn=False))
                    note = await self._start(name)
                case "pause" | "freeze":
                    node.resume()
                case "full_disk":
                    node.order(node.orders.but(full=False))
                case "refused_writes" | "unwritable_master":
                    node.order(node.orders.but(refuse=0))
                case "failed_sync":
                    node.order(node.orders.but(fail_sync=False))
                    await node.kill()  # after a failed sync nobody knows what the logs hold
                    note = await self._start(name)
                case "slow_disk":
                    node.order(node.orders.but(slow_sync=0.0))
                case "clock":
                    node.order(node.orders.but(ahead=0.0))
                case "member":
                    note = await self._ask(self._admin.join(name))
                case "clients_cut":
                    self._nodes.links.set(OTHERS, name, "open")
                case "slow_links":
                    for other in (*self._nodes.names, OTHERS):
                        self._nodes.links.slow(name, other, 0.0)
                        self._nodes.links.slow(other, name, 0.0)
        return note

    async def heal(self) -> None:
        """Undo all faults that may be left."""
        self._partitions.clear()
        self._nodes.links.heal()
        for name, node in self._nodes.by_name.items():
            failed = node.orders.fail_sync
            node.order(Orders())
            node.resume()
            if failed:
                await node.kill()
            if not node.up and not node.died:
                await self._start(name)

    def _close_links(self) -> None:
        for blow in self._partitions:
            for a, b in blocked(blow, self._nodes.names):
                if self._nodes.links.of(a, b).mode == "open":
                    self._nodes.links.set(a, b, MODES[blow.style])

    async def _start(self, name: str) -> str:
        try:
            return "; ".join(await self._nodes[name].start())
        except RailgunError as error:
            return str(error)

    async def _restart_all(self, names: Sequence[str]) -> str:
        """Stop and start each of `names` in order, each after all nodes have settled; return notes for people.

        Stops early if the nodes do not settle in time.
        """
        notes: list[str] = []
        for name in names:
            await self._nodes[name].stop()
            notes += filter(None, [await self._start(name)])
            try:
                async with asyncio.timeout(SETTLE):
                    while not await self._admin.settled(names):
                        await asyncio.sleep(0.1)
            except TimeoutError:
                return "; ".join(
                    [*notes, f"not settled after {name}: the others are not restarted"]
                )
        return "; ".join(notes)

    async def _ask(self, call: object) -> str:
        try:
            await call  # type: ignore[misc]
        except RailgunError as error:
            return str(error)
        return ""


class ProbingAdmin:
    """Administer a cluster as any client can: by admin calls, writes and reads.

    A member is removed by an admin call. It joins as a new one: with the same name, and an empty directory.
    """

    def __init__(self, nodes: Nodes, streams: Sequence[str] = ()) -> None:
        self._nodes = nodes
        self.streams = [*streams, PROBE]
        """The streams that a settled node must have completely."""

    async def remove(self, node: str) -> None:
        """Remove `node` by a call to any other node."""
        for other in self._nodes.names:
            if other != node and self._nodes[other].up:
                async with await self._nodes[other].connect(direct=True) as client:
                    await client.admin("remove_node", 20.0, node=node, wait=15)
                return

    async def join(self, node: str) -> None:
        """Start `node` with an empty directory if it was removed; a member keeps its data."""
        process = self._nodes[node]
        for other in self._nodes.names:
            if other != node and self._nodes[other].up:
                async with await self._nodes[other].connect(direct=True) as client:
                    names = {entry["name"] for entry in await client.admin("nodes", 20.0)}
                if node not in names:
                    await process.kill()
                    shutil.rmtree(process.data, ignore_errors=True)
                    await process.start()
                return

    async def lead(self, node: str) -> None:
        """Make `node` the leader of the only region, by a call to this node."""
        async with await self._nodes[node].connect(direct=True) as client:
            await client.admin("transfer", 20.0, node=node, region="global")

    async def settled(self, nodes: Sequence[str]) -> bool:
        """Return whether each node takes a write, has all older messages of every stream, and votes again.

        A node that joined and is still a learner has not settled: the other nodes must not fail yet.
        """
        try:
            async with asyncio.timeout(10.0):
                for name in nodes:
                    if not await self._well(name):
                        return False
        except (StreamsError, OSError, TimeoutError):
            return False
        return True

    async def _well(self, name: str) -> bool:
        if not self._nodes[name].up:
            return False
        async with await self._nodes[name].connect(timeout=3.0, direct=True) as client:
            await client.ensure(PROBE)
            await client.publish(PROBE, name)
            names = {entry["name"] for entry in await client.streams()}
            for stream in self.streams:
                if stream not in names:
                    return False
                end = int((await client.describe(stream))["end"])
                if end:
                    async with await client.subscribe(stream, start=end - 1) as last:
                        await last.next(3.0)
            return await _counts(client, name)


async def ask_cut_off(node: NodeProcess, stream: str = PROBE) -> CutOff:
    """Read from a cut-off node and publish to it; return its answers."""
    began = time.monotonic()
    end, read, code, text, publish_s = 0, False, "", "", 0.0
    try:
        async with await node.connect(timeout=ASK_S, direct=True) as client:
            where = client.where
            try:
                end = int((await client.describe(stream))["end"])
                if end:
                    async with await client.subscribe(stream, start=0) as sub:
                        await sub.next(ASK_S)
                        read = client.where == where  # otherwise the client went on at another node
            except (StreamsError, OSError, TimeoutError) as error:
                text = str(error)
                end = end or 1  # the node did not even describe the stream
        async with await node.connect(timeout=ASK_S, direct=True) as client:
            publish_began = time.monotonic()
            batch = build([b"cut off"])
            try:  # `client.publish` would go on at another node
                await client.ask(lambda n: client.send(Publish(request=n, stream=stream), [batch]))
            except StreamsError as error:
                code = error.code
            publish_s = time.monotonic() - publish_began
    except (StreamsError, OSError, TimeoutError) as error:
        code, text, end = "CONNECTION_LOST", str(error), end or 1
    return CutOff(node.name, stream, began, end, read, code, publish_s, text)


async def _counts(client: Client, name: str) -> bool:
    """Return whether the node votes in all regions; a node without a cluster does."""
    try:
        status = await client.admin("cluster")
    except StreamsError as error:
        if error.code == "NO_CLUSTER":
            return True
        raise
    ids = {entry["id"] for entry in status["nodes"] if entry["name"] == name}
    return all(ids <= {*region["voting"]} for region in status["regions"])
