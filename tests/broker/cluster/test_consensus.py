"""Nodes that agree, each with a disk of its own, in one event loop; and what is done to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.broker.running import run
from verification.log_disk import LogDisk

from railgun.broker.cluster.consensus import (
    MAX_PROPOSAL_BYTES,
    Consensus,
    LostProposalError,
    NoLeaderError,
    TooLargeError,
)
from railgun.broker.cluster.raft_messages import decode_message, encode_message
from railgun.broker.errors import ClosedError, LogFailedError, NoSpaceError
from railgun.broker.log.disk import Disk, NodeDisk
from railgun.broker.protocol.raft.messages import (
    Append,
    ChangeError,
    Entry,
    Members,
    Message,
    NotLeaderError,
    Settings,
)
from railgun.errors import RailgunError

QUICK = Settings(election=0.5, heartbeat=0.02, lease=0.1)
"""Elections as slow as a machine that has more to do needs: who leads should lead on while a test looks."""
DEADLINE = 10.0


async def until(true: Callable[[], Any]) -> Any:
    """Wait for this, not for ever."""
    async with asyncio.timeout(DEADLINE):
        while not (found := true()):
            await asyncio.sleep(0.002)
    return found


async def idle(node: Consensus) -> None:
    """Wait until nothing is being written."""
    await until(lambda: not node._busy)


class Lines:
    """A machine that keeps every line, and says how many there are."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, bytes]] = []
        self.restored = 0

    def apply(self, index: int, data: bytes) -> int:
        if data == b"bug":
            raise ZeroDivisionError("an error of the machine")
        self.lines.append((index, data))
        return len(self.lines)

    def snapshot(self) -> bytes:
        return b"\n".join(b"%d %s" % line for line in self.lines)

    def restore(self, index: int, data: bytes) -> None:
        pairs = [line.split(b" ", 1) for line in data.split(b"\n")] if data else []
        self.lines = [(int(at), line) for at, line in pairs]
        assert all(at <= index for at, _ in self.lines)
        self.restored += 1

    @property
    def said(self) -> list[bytes]:
        return [line for _, line in self.lines]


class Nodes:
    """Some nodes, and the links between them."""

    def __init__(self, names: str, **options: Any) -> None:
        self.names = names
        self.options = options
        self.disks: dict[str, LogDisk] = {name: LogDisk(n) for n, name in enumerate(names)}
        self.machines: dict[str, Lines] = {}
        self.up: dict[str, Consensus] = {}
        self.cut: set[tuple[str, str]] = set()
        """From whom to whom nothing comes."""
        self.lost: Callable[[str, Message], bool] = lambda to, message: False
        self.failed: list[tuple[str, RailgunError]] = []
        self.changes = 0
        self.sent: list[tuple[str, str, Message]] = []

    def send(self, sender: str, to: str, message: Message) -> None:
        def arrive() -> None:
            if to in self.up and (sender, to) not in self.cut:
                self.up[to].step(sender, decode_message(encode_message(message)))

        self.sent.append((sender, to, message))
        if (sender, to) not in self.cut and not self.lost(to, message):
            asyncio.get_running_loop().call_soon(arrive)

    def start(self, name: str, first: Members | None = None, disk: Disk | None = None) -> Consensus:
        machine = self.machines[name] = Lines()

        def changed() -> None:
            self.changes += 1

        node = Consensus(
            name,
            disk or self.disks.setdefault(name, LogDisk(len(self.disks))),
            "raft",
            machine,
            lambda to, message: self.send(name, to, message),
            changed=changed,
            failed=lambda error: self.failed.append((name, error)),
            **{"settings": QUICK, **self.options},
        )
        node.open(first)
        node.start()
        self.up[name] = node
        return node

    def kill(self, name: str, *, power: bool = True) -> None:
        self.up.pop(name).abandon()
        if power:
            self.disks[name].lose_power()
        else:
            self.disks[name].crash()

    def isolate(self, name: str, others: str | None = None) -> None:
        for other in others or self.names:
            self.cut |= {(name, other), (other, name)}

    async def leader(self, *, but: str = "") -> Consensus:
        def one() -> Consensus | None:
            leading = [node for node in self.up.values() if node.leads and node.id not in but]
            return max(leading, key=lambda node: node.term, default=None)

        found: Consensus = await until(one)
        return found

    def other(self, *but: str) -> str:
        return next(name for name in self.up if name not in but)

    async def propose(self, data: bytes) -> Any:
        """Propose to whoever leads, again until it is done."""
        async with asyncio.timeout(DEADLINE):
            while True:
                try:
                    return await (await self.leader()).propose(data)
                except (NotLeaderError, LostProposalError, ClosedError):
                    await asyncio.sleep(0.01)

    async def agree(self) -> list[bytes]:
        """Wait until all that are up have the same."""

        def equal() -> bool:
            told = [self.machines[name].lines for name in self.up]
            return all(one == told[0] for one in told)

        await until(equal)
        return self.machines[next(iter(self.up))].said


@contextlib.asynccontextmanager
async def nodes(names: str, **options: Any) -> AsyncIterator[Nodes]:
    made = Nodes(names, **options)
    for name in names:
        made.start(name, Members(tuple(names)))
    try:
        yield made
    finally:
        for node in made.up.values():
            await node.close()


@pytest.mark.parametrize("names", ["abc", "abcde"])
def test_they_elect_and_apply_the_same_in_the_same_order(names: str) -> None:
    async def main() -> None:
        async with nodes(names) as cluster:
            leader = await cluster.leader()
            results = await asyncio.gather(*(leader.propose(b"%d" % n) for n in range(50)))
            assert results == [*range(1, 51)]
            assert await cluster.agree() == [b"%d" % n for n in range(50)]
            assert leader.applied == leader.commit == leader.last_index
            assert {node.leader for node in cluster.up.values()} == {leader.id}
            assert [node.leads for node in cluster.up.values()].count(True) == 1
            assert cluster.changes >= len(names)
            follower = cluster.up[cluster.other(leader.id)]
            with pytest.raises(NotLeaderError) as error:
                await follower.propose(b"x")
            assert error.value.leader == leader.id
            assert follower.lease_left() == 0.0
            await until(lambda: 0 < leader.lease_left() <= 0.1)
            await until(lambda: leader.heard(follower.id))
            assert follower.heard(leader.id) is None

    run(main())


def test_one_alone_and_again() -> None:
    async def main() -> None:
        cluster = Nodes("a")
        node = cluster.start("a", Members(("a",)))
        assert not node.had_log
        await cluster.leader()
        assert await node.propose(b"x") == 1
        await node.barrier()
        await node.close()
        await node.close()
        for ended in (node.propose(b"y"), node.barrier(), node.change(Members(("a",)))):
            with pytest.raises(ClosedError):
                await ended
        node = cluster.start(
            "a", Members(("b",))
        )  # which it does not take: it knows who takes part
        assert node.had_log
        assert node.members == Members(("a",))
        await cluster.leader()
        assert await node.propose(b"y") == 2
        assert cluster.machines["a"].said == [b"x", b"y"]
        assert node.lease_left() > 0
        await node.close()

    run(main())


def test_without_members_it_waits() -> None:
    async def main() -> None:
        cluster = Nodes("a")
        node = cluster.start("a")
        with pytest.raises(NoLeaderError) as error:
            await node.barrier(timeout=0.3)
        assert error.value.code == "NO_LEADER"
        assert (node.term, node.leader) == (0, None)
        with pytest.raises(NotLeaderError):
            await node.propose(b"x")
        await node.close()

    run(main())


def test_a_leader_that_lost_power_comes_back() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            acknowledged = []
            for round in range(4):
                leader = await cluster.leader()
                for n in range(5):
                    acknowledged.append(b"%d.%d" % (round, n))
                    await cluster.propose(acknowledged[-1])
                lost = asyncio.gather(
                    *(leader.propose(b"lost %d" % n) for n in range(3)), return_exceptions=True
                )
                await asyncio.sleep(0)
                cluster.kill(leader.id, power=round != 2)
                assert {type(one) for one in await lost} <= {LostProposalError, NotLeaderError, int}
                acknowledged.append(b"%d" % round)
                await cluster.propose(acknowledged[-1])
                cluster.start(leader.id)
                assert cluster.up[leader.id].had_log
            said = await cluster.agree()
            assert [line for line in said if not line.startswith(b"lost")] == acknowledged
            assert len(set(said)) == len(said)

    run(main())


def test_all_lose_power_at_once_again_and_again() -> None:
    async def main() -> None:
        async with nodes("abc", snapshot_entries=7) as cluster:
            acknowledged = []
            for round in range(5):
                for n in range(10):
                    acknowledged.append(b"%d.%d" % (round, n))
                    await cluster.propose(acknowledged[-1])
                leader = await cluster.leader()
                under_way = [asyncio.ensure_future(leader.propose(b"lost")) for _ in range(20)]
                await asyncio.sleep(0.001 * round)
                for name in "abc":
                    cluster.kill(name)
                await asyncio.gather(*under_way, return_exceptions=True)
                for name in "abc":
                    cluster.start(name)
            await cluster.propose(b"last")
            said = await cluster.agree()
            assert [line for line in said if line != b"lost"] == [*acknowledged, b"last"]

    run(main())


def test_one_that_is_far_behind_gets_a_snapshot() -> None:
    async def main() -> None:
        settings = dataclasses.replace(QUICK, chunk=100)
        async with nodes("abc", snapshot_entries=20, settings=settings) as cluster:
            leader = await cluster.leader()
            late = cluster.other(leader.id)
            cluster.kill(late)
            for n in range(100):
                await cluster.propose(b"%d" % n)
            leader = await cluster.leader()
            await until(lambda: leader.applied - leader._raft.log.base < 20)
            size = leader._wal.size
            node = cluster.start(late)
            assert await cluster.agree() == [b"%d" % n for n in range(100)]
            assert cluster.machines[late].restored >= 1
            await cluster.propose(b"more")
            await cluster.agree()
            assert leader._wal.size < size + 500
            # The snapshot is on its disk, so it is there if it starts again.
            cluster.kill(late)
            node = cluster.start(late)
            assert node.applied > 80
            assert cluster.machines[late].restored == 1
            assert len(await cluster.agree()) == 101

    run(main())


def test_a_learner_becomes_a_voter_and_the_leader_leaves() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            await cluster.propose(b"before")
            leader = await cluster.leader()
            with pytest.raises(ChangeError) as error:
                await leader.change(leader.members.with_voter("d"))
            assert error.value.code == "BEHIND"
            cluster.start("d")
            await leader.change(leader.members.with_learner("d"))
            assert (await cluster.agree()) == [b"before"]
            assert cluster.up["d"].members.learners == ("d",)
            await leader.change(leader.members.with_voter("d"))
            await cluster.propose(b"with d")
            await leader.change(leader.members.without(leader.id))
            gone = cluster.up.pop(leader.id)
            assert not gone.leads
            following = await cluster.leader()
            await cluster.propose(b"without")
            assert leader.id not in following.members.all
            assert len(following.members.voters) == 3
            assert await cluster.agree() == [b"before", b"with d", b"without"]
            await gone.close()

    run(main())


def test_handing_over_waits_for_the_leases_that_were_told() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            await cluster.propose(b"x")
            leader = await cluster.leader()
            to = cluster.other(leader.id)
            loop = asyncio.get_running_loop()
            left = await until(leader.lease_left)
            over = loop.time() + left
            leader.transfer(to)
            assert leader.lease_left() == 0.0
            await until(lambda: cluster.up[to].leads)
            assert loop.time() >= over
            assert cluster.up[to].leads
            await cluster.propose(b"y")
            assert await cluster.agree() == [b"x", b"y"]
            with pytest.raises(NotLeaderError):
                leader.transfer(to)
            with pytest.raises(ChangeError):
                cluster.up[to].transfer("nobody")
            cluster.up[to].transfer(to)

    run(main())


def test_who_could_not_hand_over_has_leases_again() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            await cluster.propose(b"x")
            await cluster.agree()
            leader = await cluster.leader()
            to, term = cluster.other(leader.id), leader.term
            cluster.isolate(to)
            leader.transfer(to)
            await until(lambda: leader.leads and leader.term > term and leader.lease_left())
            await leader.propose(b"y")
            cluster.cut.clear()
            assert await cluster.agree() == [b"x", b"y"]

    run(main())


def test_a_barrier_sees_what_was_proposed_before() -> None:
    async def main() -> None:
        async with nodes("abcde") as cluster:
            for n in range(30):
                await cluster.propose(b"%d" % n)
                name = "abcde"[n % 5]
                await cluster.up[name].barrier()
                assert b"%d" % n in cluster.machines[name].said
                if n % 10 == 5:
                    leader = await cluster.leader()
                    cluster.kill(leader.id)
                    cluster.start(leader.id)

    run(main())


def test_a_barrier_waits_until_it_is_applied_here() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            await cluster.propose(b"x")
            leader = await cluster.leader()
            follower = cluster.up[cluster.other(leader.id)]
            await follower.barrier()
            cluster.lost = lambda to, message: to == follower.id and isinstance(message, Append)
            await leader.propose(b"y")
            read = asyncio.ensure_future(follower.barrier(timeout=DEADLINE))
            await until(lambda: follower._waiting)  # it knows what it waits for
            assert cluster.machines[follower.id].said == [b"x"]
            assert not read.done()
            cluster.lost = lambda to, message: False
            await read
            assert cluster.machines[follower.id].said == [b"x", b"y"]

    run(main())


def test_all_there_is_may_be_in_a_snapshot() -> None:
    async def main() -> None:
        async with nodes("abc", snapshot_entries=5) as cluster:
            late = cluster.other((await cluster.leader()).id)
            cluster.kill(late)
            for n in range(20):
                await cluster.propose(b"%d" % n)
                leader = await cluster.leader()
                await idle(leader)
                if n > 5 and leader._raft.log.base == leader.applied:
                    break
            else:
                raise AssertionError("the log was never empty")
            node = cluster.start(late)
            await cluster.agree()
            await node.barrier(timeout=DEADLINE)
            assert node.applied >= node._raft.log.base > 0

    run(main())


def test_many_barriers_at_once_while_questions_are_lost() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            await cluster.propose(b"x")
            leader = await cluster.leader()
            follower = cluster.up[cluster.other(leader.id)]
            cluster.cut = {(follower.id, leader.id)}
            asked = asyncio.gather(*(follower.barrier(timeout=DEADLINE) for _ in range(20)))
            await until(lambda: len(follower._reads) > 20)  # they have asked again
            cluster.cut.clear()
            await asked
            assert follower._reads == {}
            assert follower._waiting == []

    run(main())


def test_who_is_cut_off_cannot_read_and_does_not_know_the_fate_of_what_it_proposed() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            await cluster.propose(b"before")
            leader = await cluster.leader()
            cluster.isolate(leader.id)
            with pytest.raises(LostProposalError) as error:
                await leader.propose(b"lost")
            assert error.value.code == "FATE_UNKNOWN"
            assert not leader.leads
            assert leader.lease_left() == 0.0
            with pytest.raises(NoLeaderError):
                await leader.barrier(timeout=0.1)
            await (await cluster.leader(but=leader.id)).propose(b"after")
            cluster.cut.clear()
            assert await cluster.agree() == [b"before", b"after"]

    run(main())


def test_a_link_that_is_cut_one_way() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            await cluster.propose(b"x")
            leader = await cluster.leader()
            cluster.cut = {(name, leader.id) for name in "abc"}  # it is heard, and hears nobody
            other = await cluster.leader(but=leader.id)
            await other.propose(b"y")
            cluster.cut.clear()
            assert await cluster.agree() == [b"x", b"y"]

    run(main())


def test_many_proposals_share_syncs() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            leader = await cluster.leader()
            await leader.propose(b"first")
            before = {name: disk.syncs for name, disk in cluster.disks.items()}
            await asyncio.gather(*(leader.propose(b"%d" % n) for n in range(1000)))
            await cluster.agree()
            for name, disk in cluster.disks.items():
                assert 0 < disk.syncs - before[name] < 50

    run(main())


def test_a_disk_that_fails_ends_it() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            leader = await cluster.leader()
            await leader.propose(b"x")
            cluster.disks[leader.id].fail_syncs = 1
            with pytest.raises(LostProposalError) as error:
                await leader.propose(b"y")
            assert isinstance(error.value.__cause__, LogFailedError)
            assert [(name, type(error)) for name, error in cluster.failed] == [
                (leader.id, LogFailedError)
            ]
            assert not leader.leads
            assert leader.lease_left() == 0.0
            with pytest.raises(ClosedError, match="could not be synced"):
                await leader.propose(b"z")
            with pytest.raises(ClosedError):
                await leader.barrier()
            following = await cluster.leader()
            assert following.id != leader.id
            await cluster.propose(b"z")
            await leader.close()
            cluster.disks[leader.id].lose_power()
            cluster.start(leader.id)
            said = await cluster.agree()
            assert said in ([b"x", b"z"], [b"x", b"y", b"z"])
            assert len(cluster.failed) == 1

    run(main())


def test_what_was_not_written_is_not_acknowledged() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            leader = await cluster.leader()
            await leader.propose(b"x")
            await cluster.agree()
            full = cluster.other(leader.id)
            waiting = asyncio.ensure_future(cluster.up[full].barrier(timeout=DEADLINE))
            cluster.cut.add((leader.id, full))
            await asyncio.sleep(0)
            cluster.disks[full].room = cluster.disks[full].used() + 10
            cluster.sent.clear()
            cluster.cut.clear()
            await leader.propose(b"y")
            await until(lambda: cluster.failed)
            assert isinstance(cluster.failed[0][1], NoSpaceError)
            with contextlib.suppress(NoSpaceError):
                await waiting
            told = [message for sender, _, message in cluster.sent if sender == full]
            assert all(getattr(message, "index", 0) < leader.last_index for message in told)

    run(main())


def test_a_log_that_cannot_be_made_shorter_grows() -> None:
    async def main() -> None:
        async with nodes("a", snapshot_entries=10) as cluster:
            node = await cluster.leader()
            refused = 0

            def no_room(step: str, path: str) -> None:
                nonlocal refused
                if step == "create":
                    refused += 1
                    raise OSError(28, "No space left on device")

            cluster.disks["a"].hook = no_room
            for n in range(35):
                await node.propose(b"%d" % n)
            assert refused == 3
            assert node._raft.log.base == 0
            cluster.disks["a"].hook = None
            for n in range(35, 50):
                await node.propose(b"%d" % n)
            await until(lambda: node._raft.log.base > 30)
            assert not cluster.failed

    run(main())


def test_an_error_of_the_machine_ends_it() -> None:
    async def main() -> None:
        async with nodes("a") as cluster:
            node = await cluster.leader()
            with pytest.raises(LostProposalError):
                await node.propose(b"bug")
            assert len(cluster.failed) == 1

    run(main())


def test_what_peers_say_wrongly_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            await cluster.propose(b"x")
            leader = await cluster.leader()
            entry = Entry(1, leader.term, b"other")
            leader.step("b", Append(leader.term, 0, 0, (entry,), 0, 1))
            assert "both lead" in caplog.text
            await cluster.propose(b"y")
            assert await cluster.agree() == [b"x", b"y"]
            with pytest.raises(TooLargeError):
                await leader.propose(bytes(MAX_PROPOSAL_BYTES + 1))
            assert await leader.propose(b"") is None
            assert await cluster.agree() == [b"x", b"y"]

    run(main())


def test_who_does_not_wait_any_more_hinders_nobody() -> None:
    async def main() -> None:
        async with nodes("abc") as cluster:
            leader = await cluster.leader()
            cluster.isolate(leader.id)
            some = [asyncio.ensure_future(leader.propose(b"%d" % n)) for n in range(3)]
            read = asyncio.ensure_future(leader.barrier())
            await asyncio.sleep(0)
            for task in (*some, read):
                task.cancel()
            await asyncio.wait([*some, read])
            cluster.cut.clear()
            await cluster.propose(b"x")
            assert (await cluster.agree())[-1] == b"x"

    run(main())


def test_on_a_real_disk(tmp_path: Any) -> None:
    async def main() -> None:
        cluster = Nodes("abc")
        for name in "abc":
            cluster.start(name, Members(tuple("abc")), NodeDisk(tmp_path / name))
        for n in range(20):
            await cluster.propose(b"%d" % n)
        await cluster.agree()
        for name in "abc":
            await cluster.up.pop(name).close()
        for name in "abc":
            node = cluster.start(name, disk=NodeDisk(tmp_path / name))
            assert node.had_log
        await cluster.propose(b"last")
        assert await cluster.agree() == [*(b"%d" % n for n in range(20)), b"last"]
        for node in cluster.up.values():
            await node.close()

    run(main())
