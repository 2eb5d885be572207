"""The duties of a driver of `broker.protocol.replication`, one by one, on real files."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from tests.broker.clustered import clustered, until
from tests.broker.running import run

from railgun.broker.cluster import replica_messages as wire
from railgun.broker.cluster.flight import Flight
from railgun.broker.cluster.identity import LostIdentityError
from railgun.broker.cluster.links import Lane
from railgun.broker.cluster.regions import Promises, Region, Regions
from railgun.broker.cluster.replicated import Replicated
from railgun.broker.errors import BeyondEndError, DeposedError, NoMasterError, NoSpaceError
from railgun.broker.log.committer import Committer
from railgun.broker.log.disk import NodeDisk
from railgun.broker.log.group_log import pack_change, pack_state
from railgun.broker.protocol.groups import Saved, Settled
from railgun.broker.protocol.metadata.machine import Metadata
from railgun.broker.protocol.metadata.steering import Propose, Steering
from railgun.broker.protocol.replication import messages as m
from railgun.broker.protocol.replication.master import Phase
from railgun.broker.protocol.replication.standing import LOST, Standing
from railgun.broker.settings import StreamSettings
from railgun.broker.streams.copies import Acks
from railgun.broker.streams.groups import CopyNote, fold, pack
from railgun.broker.streams.persistent import Persistent, Stored
from railgun.errors import RailgunError
from railgun.transport.commands import Blob
from railgun.transport.proto import cluster_pb2 as n
from railgun.transport.records import Bytes, Records, build, head, patch


class Alone:
    """A node around one copy: what the copy says is kept, for the test is all the others."""

    me = "b"

    def __init__(self) -> None:
        self.said: list[tuple[str, Any, list[Blob]]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.acts = True
        self.flights: dict[str, Flight] = {}

    def send(self, to: str, command: Message, blobs: Sequence[Blob] = ()) -> bool:
        self.said.append((to, command, list(blobs)))
        return True

    def spawn(self, work: Coroutine[Any, Any, Any]) -> object:
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]

    def may_act(self) -> bool:
        return self.acts

    def changed(self) -> None:
        pass

    def name_of(self, node: str) -> str:
        return node

    def give_way(self) -> bool:
        return False

    def flight(self, node: str) -> Flight:
        return self.flights.setdefault(node, Flight())

    def all(self, kind: type[Any]) -> list[Any]:
        return [command for _, command, _ in self.said if isinstance(command, kind)]

    def batches(self) -> list[Any]:
        """All that was pushed."""
        return [one for _, said, blobs in self.said if isinstance(said, n.Push) for one in blobs]


class Full:
    """There is no room in a log for the next so many writes."""

    def __init__(self, log: Any, times: int) -> None:
        self._append, self.left = log.append, times
        log.append = self._try

    def _try(self, changes: Any, *more: Any) -> Any:
        if self.left:
            self.left -= 1
            raise NoSpaceError("no space left on device")
        return self._append(changes, *more)


class Held:
    """The line of a log does not go on until it is let go."""

    def __init__(self, copy: Replicated, log: Any) -> None:
        self._event = threading.Event()
        copy._committer.perform(log, partial(self._event.wait, 10), lambda _: None)

    def let_go(self) -> None:
        self._event.set()


def opened(path: Path, committer: Committer) -> Persistent:
    async def nowhere(_: Persistent) -> Persistent:
        raise AssertionError("there are no dead letters here")

    loop = asyncio.get_running_loop()
    disk = NodeDisk(path)
    disk.make_directory("s")
    made = Persistent(
        *("orders", StreamSettings(), disk, "s", committer, loop, lambda: 1, nowhere),
        in_cluster=True,
    )
    made.id = 7
    return made


@contextlib.asynccontextmanager
async def alone(path: Path) -> AsyncIterator[tuple[Replicated, Alone]]:
    """One copy, which hears nobody but the test."""
    loop = asyncio.get_running_loop()
    committer, around = Committer(2, loop.call_soon_threadsafe), Alone()
    copy = Replicated(opened(path, committer), committer, around)
    await copy.open()
    try:
        yield copy, around
    finally:
        copy.close()
        await loop.run_in_executor(None, committer.close)
        for task in around.tasks:
            task.cancel()
        copy.stream.close()


def batch(base: int, count: int, epoch: int, text: bytes = b"x") -> Bytes:
    made = build([text] * count)
    patch(made, base=base, epoch=epoch, time=1)
    return made


def pushed(copy: Replicated, push: m.Push, *batches: Bytes, sender: str = "a") -> None:
    copy.received(sender, wire.encode_push(copy.id, push), bytearray(b"".join(batches)))


async def filled(copy: Replicated, around: Alone, end: int, epoch: int, sender: str = "a") -> None:
    """As a replica of an epoch, it gets messages up to `end`, and its label."""
    await copy.fenced(sender, epoch, epoch << 32 | 1)
    push = m.Push(epoch << 32 | 1, epoch, 0, 0, 0, 0, 0)
    pushed(copy, push, batch(0, end, epoch), sender=sender)
    await until(lambda: copy.copy.label == epoch and copy.copy.durable == end, "it was not filled")


def on_disk(copy: Replicated) -> CopyNote:
    note = copy.stream.group_log.load()[""]
    assert isinstance(note, CopyNote)
    return note


def test_a_label_is_not_on_disk_before_the_cut_it_stands_for(tmp_path: Path) -> None:
    """Else, after a crash, the copy has what nobody has acknowledged, under the label of who has cut it off."""

    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await filled(copy, around, 9, epoch=1)
            await copy.fenced("c", 2, 2 << 32 | 1)
            held = Held(copy, copy.stream.log)
            pushed(
                copy, m.Push(2 << 32 | 1, 2, 0, 0, 0, 0, 0), sender="c"
            )  # nothing of it was safe
            await copy.stream.perform(copy.stream.group_log, lambda: None)
            found = on_disk(copy).label, copy.stream.log.end
            held.let_go()
            assert found == (1, 9)
            await until(lambda: on_disk(copy).label == 2 and copy.stream.log.end == 0)

    run(main())


def test_a_master_labels_its_copy_when_it_is_cut(tmp_path: Path) -> None:
    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await filled(copy, around, 9, epoch=1)
            await copy.begin(3, [("a", "b", "c")], fresh=False)
            held = Held(copy, copy.stream.log)
            copy.session("c", 3 << 32 | 1, Standing(2, 0, 0))  # better, and empty
            await copy.stream.perform(copy.stream.group_log, lambda: None)
            found = on_disk(copy).label
            held.let_go()
            assert found == 1
            await until(lambda: on_disk(copy).label == 3 and copy.stream.log.end == 0)
            assert copy.master is not None
            assert copy.master.start == 0

    run(main())


def test_a_copy_hears_no_former_master_while_it_promises(tmp_path: Path) -> None:
    """What it takes then is in no standing, and lies where the next master writes."""

    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await filled(copy, around, 5, epoch=1)
            held = Held(copy, copy.stream.group_log)
            fencing = asyncio.create_task(copy.fenced("c", 2, 2 << 32 | 1))
            await copy.stream.perform(copy.stream.log, lambda: None)  # it waits for the groups now
            pushed(copy, m.Push(1 << 32 | 1, 1, 5, 1, 0, 5, 0), batch(5, 4, 1))
            await copy.stream.perform(copy.stream.log, lambda: None)
            held.let_go()
            standing = await fencing
            await copy.settle()
            assert (standing.end, copy.stream.log.end) == (5, 5)
            assert [one.end for one in around.all(n.Has) if one.end > 5] == []

    run(main())


def test_what_is_not_counted_yet_is_not_pushed(tmp_path: Path) -> None:
    """A log has what was just synced before its master knows. Pushed now, it would be pushed twice, and cut between."""

    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await copy.begin(1, [("a", "b", "c")], fresh=True)
            await until(lambda: copy.master is not None and copy.master.phase.value == "lead")
            log = copy.stream.log

            def write() -> None:  # what the loop has not heard of yet
                log.append([batch(0, 3, 1)])
                log.sync()
                log.append([batch(3, 3, 1)])
                log.sync()

            await copy.stream.perform(log, write)
            assert copy.master is not None
            copy._do(copy.master.appended(0, 1, 3))
            copy.session("a", 1 << 32 | 1, Standing(0, 0, 0))
            await until(lambda: around.batches() != [], "nothing was pushed")
            assert [head(one).base for one in around.batches()] == [0]
            assert copy.master.peers["a"].next == 3

    run(main())


def changed(copy: Replicated, session: int, number: int, end: int) -> None:
    """The group g has settled up to `end`."""
    blob = pack_change("g", pack([Settled(end - 1, end)]))
    push = m.PushGroups(session, session >> 32, number, whole=False)
    copy.received("a", wire.encode_push_groups(copy.id, push), bytearray(blob))


async def grouped(copy: Replicated, session: int) -> None:
    """It has the states of groups, as a replica."""
    whole = m.PushGroups(session, session >> 32, 0, whole=True)
    blob = pack_state("g", fold.dump(Saved()))
    copy.received("a", wire.encode_push_groups(copy.id, whole), bytearray(blob))
    await until(lambda: on_disk(copy).groups == (session >> 32, 0))


def test_changes_of_groups_behind_one_that_failed_are_not_counted(tmp_path: Path) -> None:
    """It has the second change and not the first. Who believes that it has both loses the first."""

    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await filled(copy, around, 5, epoch=1)
            await grouped(copy, 1 << 32 | 1)
            Full(copy.stream.group_log, 1)
            held = Held(copy, copy.stream.group_log)
            changed(copy, 1 << 32 | 1, 1, 1)
            copy._committer.perform(copy.stream.group_log, lambda: None, lambda _: None)  # apart
            changed(copy, 1 << 32 | 1, 2, 2)
            held.let_go()
            standing = await copy.fenced("c", 2, 2 << 32 | 1)
            assert standing.groups == (1, 0)
            assert on_disk(copy).groups == (1, 0)

    run(main())


def test_a_label_that_was_not_written_is_not_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await filled(copy, around, 5, epoch=1)
            await copy.fenced("a", 2, 2 << 32 | 1)
            full = Full(copy.stream.group_log, 1)
            pushed(copy, m.Push(2 << 32 | 1, 2, 5, 1, 5, 0, 0))
            await until(lambda: not full.left)
            standing = await copy.fenced("a", 2, 2 << 32 | 2)
            assert standing.label == on_disk(copy).label == 1

    run(main())


def test_what_is_safe_is_not_noted_before_it_is_there(tmp_path: Path) -> None:
    """A copy that begins anew is safe up to there when it has begun. A crash before that leaves something else."""

    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await filled(copy, around, 9, epoch=1)
            session = 2 << 32 | 1
            await copy.fenced("c", 2, session)
            held = Held(copy, copy.stream.log)
            pushed(copy, m.Push(session, 2, 7, 0, 7, 7, 7, anew=True), sender="c")
            await grouped(copy, session)
            found = on_disk(copy).safe
            held.let_go()
            assert found == 0
            await until(lambda: copy.stream.log.first == 7)

    run(main())


async def serving(copy: Replicated, epoch: int) -> None:
    """It is the master, of a set of one."""
    await copy.begin(epoch, [("b",)], fresh=False)
    await until(lambda: copy.leads, "it does not lead")


def with_id(text: bytes) -> bytearray:
    return build([text], [text])


async def published(copy: Replicated, batch: bytearray) -> Stored | RailgunError:
    told: asyncio.Future[Stored | RailgunError] = asyncio.get_running_loop().create_future()
    copy.stream.publish([batch], told.set_result)
    return await told


class Links:
    """Connections to all others, which the test looks at."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, to: str, lane: Lane, command: Message, blobs: Sequence[Blob] = ()) -> bool:
        self.said.append(command)
        return True

    def is_up(self, id: str, lane: Lane = "control") -> bool:
        return True


@contextlib.asynccontextmanager
async def region(path: Path) -> AsyncIterator[tuple[Region, Links]]:
    """A region with one stream, whose other nodes are the test."""
    loop = asyncio.get_running_loop()
    committer, links, disk = Committer(2, loop.call_soon_threadsafe), Links(), NodeDisk(path)
    disk.make_directory("cluster")
    tasks: list[asyncio.Task[Any]] = []

    def spawn(work: Coroutine[Any, Any, Any]) -> None:
        tasks.append(loop.create_task(work))

    regions = Regions("b", links, disk, committer, spawn, lambda: None, lambda _: None)
    made, stream = regions.get("global"), opened(path, committer)
    await made.add(stream, 0)
    try:
        yield made, links
    finally:
        regions.close()
        await loop.run_in_executor(None, committer.close)
        for task in tasks:
            task.cancel()
        stream.close()


def test_a_session_is_opened_when_all_copies_can_hear_it(tmp_path: Path) -> None:
    """What a replica tells a copy that does not know yet that it is the master's would never be told again."""

    async def main() -> None:
        async with region(tmp_path) as (made, links):
            made._sets, made._replicas = [("a", "b")], {"a"}
            answered = 0

            def answer() -> None:  # each fence once, as a replica does
                nonlocal answered
                fences = [one for one in links.said if isinstance(one, n.Fence)]
                for asked in fences[answered:]:
                    told = n.Fenced(region="global", epoch=1, session=asked.session)
                    told.standings.append(wire.encode_standing(7, Standing(0, 0, 0)))
                    made.fenced("a", told)
                answered = len(fences)

            copy = made.streams[7]
            held = Held(copy, copy.stream.log)
            leading = asyncio.create_task(made._lead(1, 100))
            await until(lambda: made.led == 1)
            made.up("a")  # while the copy waits for its disk
            answer()
            held.let_go()
            await leading
            answer()
            assert copy.master is not None
            assert "a" in copy.master.peers, "it never hears of that replica"
            assert copy.master.peers["a"].session == made._sessions["a"]

    run(main())


def test_a_fence_that_comes_late_is_not_the_last(tmp_path: Path) -> None:
    async def main() -> None:
        async with region(tmp_path) as (made, links):
            for number in (2, 1):  # by two connections
                session = 5 << 32 | number
                asked = n.Fence(region="global", epoch=5, session=session)
                await made.regions._fence("a", asked)
            replica = made.streams[7].replica
            assert replica is not None
            assert replica.session == 5 << 32 | 2
            assert [one.session & 3 for one in links.said] == [2]

    run(main())


def test_promises_that_cannot_be_read_are_no_promises(tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path)
    disk.make_directory("cluster")
    (tmp_path / "cluster" / "promises.json").write_text("[1]")
    with pytest.raises(LostIdentityError):
        Promises(disk)


def test_a_master_that_is_being_replaced_gets_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was silent, and comes back while its successor is agreed on: both would act."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            members = [cluster.member(name) for name in cluster.servers]
            leaders = [one for one in members if one.consensus is not None and one.consensus.leads]
            (member,) = leaders
            leasing, there = member.leasing, member.metadata.regions["global"]
            master, proposed, go = there.master, asyncio.Event(), asyncio.Event()
            assert master is not None
            other = next(one for one in there.voting if one != master)
            command = {
                "do": "master",
                "region": "global",
                "master": other,
                "epoch": there.epoch + 1,
            }

            async def slowly(given: dict[str, Any], timeout: float = 0) -> dict[str, Any]:
                proposed.set()
                await go.wait()
                return {}

            monkeypatch.setattr(Steering, "decide", lambda *_: [Propose(command)])
            monkeypatch.setattr(member, "propose", slowly)
            await proposed.wait()
            told = leasing.grant(master, {})
            go.set()
            assert (told["lease"], told["epochs"]) == (0.0, {})

    run(main())


def test_who_does_not_know_all_that_was_agreed_on_grants_and_removes_nobody(tmp_path: Path) -> None:
    """A new leader has not applied all of its log. Who is told to be removed takes no part any more, for good."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            members = [cluster.member(name) for name in cluster.servers]
            (member,) = [
                one for one in members if one.consensus is not None and one.consensus.leads
            ]
            other = next(one.me for one in members if one is not member)
            known, behind = member.metadata, Metadata.load(member.metadata.dump())
            behind.nodes.pop(other)
            assert member.consensus is not None
            applied, began = member.consensus._applied, member.consensus._raft.began
            try:  # in one turn of the loop: as it was when it began to lead
                member.metadata, member.consensus._applied = behind, began - 1
                told = [member.leasing.grant(one, {}) for one in (other, member.me)]
            finally:
                member.metadata, member.consensus._applied = known, applied
            assert told == [{"lease": 0.0, "epochs": {}}] * 2

    run(main())


def test_a_copy_that_could_not_begin_asks_for_another_epoch_when_it_can(tmp_path: Path) -> None:
    async def main() -> None:
        async with region(tmp_path) as (made, _):
            made._sets, made._replicas = [("b",)], set()
            copy = made.streams[7]
            copy._label, copy._doubtful = LOST, True  # and that is not on disk
            full = Full(copy.stream.group_log, 1)
            await made._lead(1, 0)
            assert full.left == 0
            assert made.trouble
            await until(lambda: copy.broken and not made.trouble, "it never begins")

    run(main())


def test_whatever_another_node_answers_leases_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            asked = 0
            member = next(
                one
                for one in map(cluster.member, cluster.servers)
                if one.consensus is not None and not one.consensus.leads
            )

            async def nonsense(*_: Any) -> Any:
                nonlocal asked
                asked += 1
                return ["nonsense"]

            monkeypatch.setattr(member.links, "call", nonsense)
            await until(lambda: asked > 3, "it does not ask any more")

    run(main())


def test_ids_that_were_being_read_are_not_those_of_the_next_epoch(tmp_path: Path) -> None:
    """Another master has taken messages meanwhile: with the old IDs they would be stored again."""

    async def main() -> None:
        async with alone(tmp_path) as (copy, _):
            await serving(copy, 1)
            reading, go = copy.stream._read_ids, threading.Event()

            def slowly() -> Any:
                found = reading()
                go.wait(10)
                return found

            copy.stream._read_ids = slowly  # type: ignore[method-assign]
            first = asyncio.create_task(published(copy, with_id(b"first")))
            await until(lambda: copy.stream._early is not None)
            copy.stream._read_ids = reading  # type: ignore[method-assign]
            await copy.fenced("a", 2, 2 << 32 | 1)
            assert isinstance(await first, NoMasterError)
            sent = with_id(b"second")
            patch(sent, base=0, epoch=2, time=1)
            pushed(copy, m.Push(2 << 32 | 1, 2, 0, 0, 0, 0, 0), sent)
            await until(lambda: copy.copy.durable == 1)
            go.set()
            assert copy.stream._loading is not None
            await copy.stream._loading
            await serving(copy, 3)
            again = await published(copy, with_id(b"second"))
            assert isinstance(again, Stored)
            assert (again.count, copy.stream.log.end) == (0, 1)

    run(main())


def test_ids_are_not_read_before_the_copy_is_the_log(tmp_path: Path) -> None:
    """A dead letter may be brought to a stream whose master is still fetching what it lacks."""

    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await filled(copy, around, 1, epoch=1)
            refused = await published(copy, with_id(b"one"))
            assert isinstance(refused, NoMasterError)
            assert copy.stream._box is None

    run(main())


async def leading(copy: Replicated) -> None:
    """It is the master of epoch 1, of a set of three; nobody else has told anything yet."""
    await copy.begin(1, [("a", "b", "c")], fresh=True)
    await until(lambda: copy.master is not None and copy.master.phase is Phase.LEAD)


def test_a_change_of_groups_that_comes_while_they_are_read_is_not_left_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await leading(copy)
            copy._ready = True
            held = Held(copy, copy.stream.group_log)
            copy.session("a", 1 << 32 | 1, Standing(0, 0, 0))  # the states are being read for it
            await asyncio.sleep(0)
            copy.keep([("g", pack([Settled(0, 1)]))], lambda _: None)
            held.let_go()
            while copy._committer._lines:  # the loop stands still, and is told of both at once
                time.sleep(0.001)
            await until(lambda: any(one.number == 1 for one in around.all(n.PushGroups)))
            assert copy.master is not None
            assert copy.master.peers["a"].sent == 1

    run(main())


def test_what_is_kept_may_begin_within_a_batch(tmp_path: Path) -> None:
    """A purge takes away messages, not batches; whoever has nothing is fed from there all the same."""

    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await serving(copy, 1)
            assert isinstance(await published(copy, build([b"0", b"1", b"2", b"3"])), Stored)
            assert await copy.stream.purge(2) == 2
            copy.session("a", 1 << 32 | 1, Standing(0, 0, 0))
            await until(lambda: around.batches() != [], "it is not fed")
            sent = Records(around.batches()[0])
            assert (sent.base, sent.payloads()) == (2, [b"2", b"3"])
            assert around.all(n.Push)[0].anew

            await copy.fenced("a", 2, 2 << 32 | 1)
            copy.received("a", n.Fetch(stream=7, session=2 << 32 | 1, begin=2), bytearray())
            await until(lambda: around.all(n.Fetched) != [])
            fetched = next(blobs for _, said, blobs in around.said if isinstance(said, n.Fetched))
            assert Records(fetched[0]).base == 2

    run(main())


def test_who_asked_gets_nothing_of_another_master(tmp_path: Path) -> None:
    """What a former candidate has asked for may be read when the next master has written something else."""

    async def main() -> None:
        async with alone(tmp_path) as (copy, around):
            await filled(copy, around, 5, epoch=1)
            await copy.fenced("a", 2, 2 << 32 | 1)
            for asked in (
                n.Fetch(stream=7, session=2 << 32 | 1),
                n.FetchGroups(stream=7, session=2 << 32 | 1),
            ):
                copy.received("a", asked, bytearray())
            await copy.fenced("c", 3, 3 << 32 | 1)
            await asyncio.gather(*around.tasks)
            assert around.all(n.Fetched) == around.all(n.FetchedGroups) == []

    run(main())


def test_who_waits_for_all_is_answered_when_there_is_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with alone(tmp_path) as (copy, _):
            await serving(copy, 1)
            told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            copy.stream.publish([build([b"x"])], told.set_result, acks=Acks.ALL)
            assert isinstance(await asyncio.wait_for(told, 10), Stored)

    run(main())


def test_a_purge_does_not_wait_for_ever_when_the_master_is_none_any_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with alone(tmp_path) as (copy, _):
            await serving(copy, 1)
            assert isinstance(await published(copy, build([b"x"])), Stored)
            held = Held(copy, copy.stream.log)
            purging = asyncio.create_task(copy.stream.purge(1))
            await asyncio.sleep(0)
            copy.step_down()
            held.let_go()
            with pytest.raises(DeposedError):
                await asyncio.wait_for(purging, 10)

    run(main())


def test_what_is_not_safe_cannot_be_purged(tmp_path: Path) -> None:
    """The others may never get it, and use its offsets anew: then what they have there would be taken for gone."""

    async def main() -> None:
        async with alone(tmp_path) as (copy, _):
            await leading(copy)
            copy._ready = True
            told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            copy.stream.publish([build([b"x"])], told.set_result, acks=Acks.MASTER)
            assert isinstance(await told, Stored)
            with pytest.raises(BeyondEndError):
                await asyncio.wait_for(copy.stream.purge(1), 10)
            assert copy.stream.log.first == 0

    run(main())
