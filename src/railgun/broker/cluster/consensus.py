"""Drives Raft: its clock, its disk and its links, and those who wait for something.

The machine (`broker.protocol.raft`) decides, the log (`wal`) remembers, a `Machine` of the caller gets what was agreed
on.

Rules:

1. All of it happens in one event loop, but for writing: that is done by one thread of its own, one `Ready` after the
   other, so the loop never waits for a disk. What is decided meanwhile goes into the next: many proposals, one sync.
2. Entries are applied in the order of the log, on every node the same. What the machine says to an entry is told to who
   proposed it, here. An entry without data is applied nowhere.
3. A proposal has an end: its result, or `NotLeaderError` (it is in no log), or `LostProposalError` (nobody here knows
   whether it will be applied): the lead was lost, or this node ended, before it was known to be committed.
4. A barrier returns when all that was committed anywhere before it began is applied here. It asks again as long as
   there is time. Numbers of reads begin anywhere: an answer to a node that was killed must not be taken for one to its
   successor.
5. A write that fails is the end: nothing is said to be persisted, all who wait are told, and so is the owner, once
   (`failed`). So it is if the machine raises. The node starts again from its disk, or does not. If the disk has only
   refused the write, `probe` tells when it takes one again.
6. After so many entries that were applied the log is made shorter, between two writes: the state is taken in the loop,
   and written by the thread. If there is no room for that, it is tried again later.
7. What a peer says wrongly is left out, and logged. What `send` cannot send is lost: Raft can live with that.
8. Leases that were told by `lease_left` are kept: a transfer begins when the last one is over, and none is told
   meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import secrets
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from railgun.broker.cluster.wal import Wal
from railgun.broker.errors import ClosedError, LogFailedError, StorageError
from railgun.broker.log.disk import Disk
from railgun.broker.protocol.raft import Raft
from railgun.broker.protocol.raft.messages import (
    Appended,
    ChangeError,
    Entry,
    Installing,
    Members,
    Message,
    Ready,
    Settings,
    Snapshot,
)
from railgun.broker.protocol.raft.state import Role
from railgun.errors import ProtocolError, RailgunError, said

LARGEST: Final = 4 << 20
"""Bytes of a proposal: with them a message fits into a frame."""
_LOG: Final = logging.getLogger(__name__)


class LostProposalError(RailgunError):
    """Nobody here knows what becomes of a proposal: it may be applied, now or later, or never."""

    code: ClassVar[str] = "FATE_UNKNOWN"


class NoLeaderError(RailgunError):
    """There was no leader who could tell what is committed; nothing has changed."""

    code: ClassVar[str] = "NO_LEADER"


class TooLargeError(RailgunError):
    """A proposal that does not fit into a message: it is in no log."""

    code: ClassVar[str] = "TOO_LARGE"


class Machine(Protocol):
    """What is agreed on. It is called in the event loop, in order, and says the same on every node."""

    def apply(self, index: int, data: bytes) -> Any:
        """An entry; what is returned is told to who proposed it, here. It must not raise, whatever the data is."""
        ...

    def snapshot(self) -> bytes:
        """All that was applied."""
        ...

    def restore(self, index: int, data: bytes) -> None:
        """Be what a snapshot says, in place of all that was applied; `index` is its last entry."""
        ...


@dataclass(eq=False, slots=True)
class _Barrier:
    done: asyncio.Future[None]
    asked: asyncio.Future[None]  # done when there is an answer
    index: int | None = None  # to be applied, once that is known


_Seen: TypeAlias = tuple[Role, int, str | None, Members]


class Consensus:
    """One node: see the rules of the module. `open`, `start`, and at the end `close`."""

    def __init__(
        self,
        id: str,
        disk: Disk,
        directory: str,
        machine: Machine,
        send: Callable[[str, Message], None],
        *,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        snapshot_entries: int = 1000,
        changed: Callable[[], None] = lambda: None,
        failed: Callable[[RailgunError], None] = lambda error: None,
    ) -> None:
        self.id = id
        self.settings = settings or Settings()
        self.known = False
        """Whether there was something in the directory, before `open`."""
        self.error: RailgunError | None = None
        """What has made an end of it."""
        self._disk, self._directory = disk, directory
        self._machine, self._send, self._clock = machine, send, clock
        self._seed = seed ^ zlib.crc32(id.encode())  # nodes must not all wait equally long
        self._snapshot_entries, self._changed, self._failed = snapshot_entries, changed, failed
        self._made: Raft | None = None
        self._wal: Wal
        self._missing = False  # whether its file was gone when it was looked at last
        self._applied = 0
        self._compact_at = snapshot_entries
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="railgun-raft")
        self._ended = False
        self._busy = False  # the thread has work
        self._idle: asyncio.Future[None] | None = None  # who waits until it has none
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._seen: _Seen
        self._proposals: dict[int, tuple[int, asyncio.Future[Any]]] = {}  # index: its term
        self._reads: dict[int, _Barrier] = {}
        self._numbers = itertools.count(secrets.randbits(62))
        self._waiting: list[tuple[int, int, _Barrier]] = []  # a heap: by the index to be applied
        self._heard: dict[str, float] = {}
        self._told_until = float("-inf")  # the last lease that was told
        self._moving: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Consensus({self._made or self.id})"

    # ------------------------------------------------------------ its life

    def open(self, first: Members | None = None) -> list[str]:
        """Read the log, or begin one with these members; what people should know. It waits for the disk.

        Without members a node waits for a leader to tell it who takes part.
        """
        self._wal, found = Wal.open(self._disk, self._directory)
        snapshot = found.snapshot
        self.known = snapshot is not None
        if snapshot is None:
            snapshot = Snapshot(0, 0, first or Members(()))
            self._wal.write(None, snapshot, ())
            self._wal.sync()
        if snapshot.index:
            self._machine.restore(snapshot.index, snapshot.data)
        self._made = Raft(
            self.id,
            self.settings,
            self._clock(),
            snapshot=snapshot,
            hard=found.hard,
            entries=found.entries,
            seed=self._seed,
        )
        self._applied = snapshot.index
        self._compact_at = snapshot.index + self._snapshot_entries
        self._seen = self._look_at()
        return found.told

    def start(self) -> None:
        """Take part, in the running event loop."""
        assert self._made is not None, "open comes first"
        self._loop = asyncio.get_running_loop()
        self._act()

    def check_files(self) -> None:
        """Take no more part if somebody has removed the log: this node would forget what it promises from now on.

        To be called now and then: the log has to be missing twice, for it is replaced in another thread.
        """
        missing = not self._ended and not self._wal.has_file()
        if missing and self._missing:
            told = f"{self._disk.where(self._directory)} was removed by somebody"
            self._fail(
                LogFailedError(f"{told}: this node takes no part any more. Replace it."), told
            )
        self._missing = missing

    async def probe(self) -> None:
        """Find out whether the log can be written, after a write was refused; if not, raise as that write did."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._wal.probe)

    async def close(self) -> None:
        """Take no more part. What is being written is written; who waits is told."""
        self._end(None)
        if self._busy and self._loop is not None:
            self._idle = self._idle or self._loop.create_future()
            await self._idle
        self._thread.shutdown(wait=False)
        if self._made is not None:
            try:
                await asyncio.to_thread(self._wal.close)
            except StorageError as error:  # all that anybody relies on was synced before
                _LOG.warning("%s has left its log as it was: %s", self.id, error)

    def abandon(self) -> None:
        """Stop at once, as if the process were gone: nothing more is written, sent or applied."""
        self._end(None)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _end(self, error: RailgunError | None) -> None:
        if self._ended:
            return
        self._ended, self.error = True, error
        for timer in (self._timer, self._moving):
            if timer is not None:
                timer.cancel()
        why = f"{self.id} has ended" if error is None else f"{self.id} has failed: {said(error)}"
        proposals, self._proposals = self._proposals, {}
        for index, (_, future) in proposals.items():
            _refuse(future, _lost(index, why, error))
        barriers = {*self._reads.values(), *(barrier for _, _, barrier in self._waiting)}
        self._reads, self._waiting = {}, []
        for barrier in barriers:
            _refuse(barrier.done, error or ClosedError(why))

    def _fail(self, error: BaseException, what: str) -> None:
        if self._ended:
            return
        if not isinstance(error, RailgunError):
            _LOG.error("%s: %s", self.id, what, exc_info=error)
            told = LogFailedError(f"{self.id} has ended: {what}: {error!r}. Start the node again.")
            told.__cause__ = error
            error = told
        self._end(error)
        try:
            self._failed(error)
        except Exception:
            _LOG.exception("%s has failed, and who was told of it has failed too", self.id)

    def _check(self) -> Raft:
        if self._ended:
            why = f": {self.error}" if self.error is not None else ""
            raise ClosedError(f"{self.id} takes no part any more{why}") from self.error
        if self._loop is None:
            raise ClosedError(f"{self.id} has not started yet")
        return self._raft

    # ------------------------------------------------------------ what is known

    @property
    def _raft(self) -> Raft:
        assert self._made is not None, "open comes first"
        return self._made

    @property
    def leader(self) -> str | None:
        """Who leads, if that is known."""
        return self._raft.leader

    @property
    def leads(self) -> bool:
        """Whether this node leads, as far as it knows."""
        return not self._ended and self._raft.role is Role.LEADER

    @property
    def term(self) -> int:
        """The term."""
        return self._raft.term

    @property
    def members(self) -> Members:
        """Who takes part, by the last change in the log, whether it is committed or not."""
        return self._raft.log.members

    @property
    def commit(self) -> int:
        """The last index that is known to be committed."""
        return self._raft.commit

    @property
    def applied(self) -> int:
        """The last index that was applied."""
        return self._applied

    @property
    def knows_all(self) -> bool:
        """Whether this node leads, and has applied all that was agreed on before it did."""
        return self.leads and self._applied >= self._raft.began

    @property
    def last_index(self) -> int:
        """The last index of the log."""
        return self._raft.log.last

    def lease_left(self) -> float:
        """For how many seconds from now no other node can lead; 0.0 if that is not known."""
        raft, now = self._raft, self._clock()
        if not self.leads or self._moving is not None or raft.moving is not None:
            return 0.0
        if not raft.has_lease(now):
            return 0.0
        assert self.settings.lease is not None
        until = raft.confirmed + self.settings.lease
        self._told_until = max(self._told_until, until)
        return until - now

    def heard(self, node: str) -> float | None:
        """When a node has last answered this leader, by its clock; None if it has not, or this one does not lead."""
        return self._heard.get(node) if self.leads else None

    # ------------------------------------------------------------ what happens

    def step(self, sender: str, message: Message) -> None:
        """A message has come."""
        if self._ended or self._loop is None:
            return
        raft, now = self._raft, self._clock()
        try:
            raft.step(sender, message, now)
        except ProtocolError as error:
            _LOG.error("%s leaves out what %s says: %s", self.id, sender, error)
        except Exception as error:
            self._fail(error, f"a message of {sender} was not understood")
            return
        if isinstance(message, Appended | Installing) and message.term == raft.term:
            self._heard[sender] = now
        self._act()

    async def propose(self, data: bytes) -> Any:
        """Have an entry applied by everybody: what the machine says to it, here."""
        raft = self._check()
        if len(data) > LARGEST:
            raise TooLargeError(
                f"an entry of {len(data):,} bytes: {LARGEST:,} are the most. Say it in several."
            )
        return await self._applied_here(*raft.propose([data], self._clock()))

    async def change(self, members: Members) -> None:
        """Change who takes part; returns when that is committed. `ChangeError`: it cannot be done now."""
        await self._applied_here(*self._check().change(members, self._clock()))

    def transfer(self, to: str) -> None:
        """Let another node lead, as soon as leases allow it. What comes of it is seen in `leader`."""
        raft = self._check()
        raft.check_leads("hand over")
        if to not in raft.log.members.voters:
            raise ChangeError("NO_VOTER", f"{to} is no voter, so it cannot lead")
        if to == self.id:
            return
        assert self._loop is not None
        if self._moving is not None:
            self._moving.cancel()
        wait = max(0.0, self._told_until - self._clock())
        self._moving = self._loop.call_later(wait, self._hand_over, to, raft.term)

    async def barrier(self, timeout: float = 2.0) -> None:
        """Return when all that was committed before is applied here; `NoLeaderError` if that takes too long."""
        self._check()
        assert self._loop is not None
        barrier = _Barrier(self._loop.create_future(), self._loop.create_future())
        numbers = []
        deadline = self._loop.time() + timeout
        heartbeat = self.settings.heartbeat
        try:
            while (left := deadline - self._loop.time()) > 0 and not barrier.done.done():
                if barrier.index is not None:
                    await asyncio.wait([barrier.done], timeout=left)
                    continue
                # Any answer will do: all of its questions were asked after it began.
                numbers.append(number := next(self._numbers))
                self._reads[number] = barrier
                asked = barrier.asked = self._loop.create_future()
                self._raft.read(number, self._clock())
                self._act()
                both, pause = (barrier.done, asked), min(left, 2 * heartbeat)
                await asyncio.wait(both, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if asked.done() and barrier.index is None:
                    await asyncio.wait([barrier.done], timeout=min(left, heartbeat / 2))
            if barrier.done.done():
                return barrier.done.result()
            if barrier.index is not None:
                raise NoLeaderError(
                    f"{self.id} has applied {self._applied} and not {barrier.index} after {timeout} s: try again"
                )
            raise NoLeaderError(
                f"{self.id} found no leader that a majority follows, for {timeout} s: try again"
            )
        finally:
            for number in numbers:
                self._reads.pop(number, None)
            self._waiting = [one for one in self._waiting if one[2] is not barrier]
            heapq.heapify(self._waiting)

    async def _applied_here(self, term: int, index: int) -> Any:
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        self._proposals[index] = term, future
        self._act()
        return await future

    def _hand_over(self, to: str, term: int) -> None:
        self._moving = None
        raft = self._raft
        if not self._ended and raft.role is Role.LEADER and raft.term == term:
            try:
                raft.transfer(to, self._clock())
            except RailgunError as error:
                _LOG.warning("%s cannot hand over: %s", self.id, error)
            self._act()

    # ------------------------------------------------------------ what is done

    def _act(self) -> None:
        """Something has happened: see what there is to do, when all else of this turn has happened too."""
        if self._ended or self._loop is None:
            return
        if not self._scheduled and not self._busy:
            self._scheduled = True
            self._loop.call_soon(self._pump)
        self._set_timer()
        self._tell_changes()

    def _set_timer(self) -> None:
        """Be there in time. A timer that comes too early costs less than a new one for each message."""
        due, now = self._raft.due, self._clock()
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        assert self._loop is not None
        self._timer, self._timer_due = self._loop.call_later(max(0.0, due - now), self._tick), due

    def _tick(self) -> None:
        self._timer = None
        if self._ended:
            return
        now = self._clock()
        if now >= self._raft.due:
            try:
                self._raft.tick(now)
            except Exception as error:
                self._fail(error, "it could not go on")
        self._act()

    def _pump(self) -> None:
        self._scheduled = False
        raft = self._raft
        while not self._ended and not self._busy:
            if self._applied >= self._compact_at:
                self._compact()
            elif raft.has_ready:
                ready = raft.ready()
                self._send_all(ready.early)
                if ready.must_sync:
                    self._work(partial(self._write, ready), partial(self._written, ready))
                else:
                    self._finish(ready)
            else:
                break
        if not self._ended:
            self._set_timer()
            self._tell_changes()

    def _work(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Let the thread do something."""
        loop = self._loop
        assert loop is not None
        self._busy = True

        def finished(error: BaseException | None) -> None:
            self._busy = False
            if self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
            if not self._ended:
                done(error)
                self._pump()

        def back(future: Future[None]) -> None:
            with contextlib.suppress(
                RuntimeError
            ):  # the loop is closed: nobody is there to be told
                # What was abandoned before it began is over, too: whoever closes waits for it.
                error = None if future.cancelled() else future.exception()
                loop.call_soon_threadsafe(finished, error)

        self._thread.submit(work).add_done_callback(back)

    def _write(self, ready: Ready) -> None:
        self._wal.write(ready.hard, ready.snapshot, ready.entries)
        self._wal.sync()

    def _written(self, ready: Ready, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error, "its log could not be written")
        else:
            self._finish(ready)

    def _finish(self, ready: Ready) -> None:
        """It is on disk: the rest of a `Ready`."""
        try:
            self._raft.persisted(ready, self._clock())
            self._send_all(ready.late)
            if ready.snapshot is not None:
                self._restore(ready.snapshot)
            for entry in ready.committed:
                self._apply(entry)
        except Exception as error:
            self._fail(error, "what was agreed on could not be applied")
            return
        for number, index in ready.reads:
            if (barrier := self._reads.pop(number, None)) is not None:
                self._answer(barrier, index)
        while self._waiting and self._waiting[0][0] <= self._applied:
            barrier = heapq.heappop(self._waiting)[2]
            if not barrier.done.done():
                barrier.done.set_result(None)

    def _send_all(self, messages: tuple[tuple[str, Message], ...]) -> None:
        for to, message in messages:
            try:
                self._send(to, message)
            except Exception:
                _LOG.exception("%s could not send to %s", self.id, to)

    def _restore(self, snapshot: Snapshot) -> None:
        self._machine.restore(snapshot.index, snapshot.data)
        self._applied = snapshot.index
        self._compact_at = snapshot.index + self._snapshot_entries
        for index in [index for index in self._proposals if index <= snapshot.index]:
            _, future = self._proposals.pop(index)
            _refuse(future, _lost(index, "it is in a snapshot, or another is"))

    def _apply(self, entry: Entry) -> None:
        result = self._machine.apply(entry.index, entry.data) if entry.data else None
        self._applied = entry.index
        term, future = self._proposals.pop(entry.index, (0, None))
        if future is None or future.done():
            return
        if term == entry.term:
            future.set_result(result)
        else:
            _refuse(future, _lost(entry.index, "another entry has its place"))

    def _answer(self, barrier: _Barrier, index: int | None) -> None:
        if not barrier.asked.done():
            barrier.asked.set_result(None)
        if index is not None and barrier.index is None:
            barrier.index = index
            heapq.heappush(self._waiting, (index, next(self._numbers), barrier))

    def _compact(self) -> None:
        raft = self._raft
        self._compact_at = self._applied + self._snapshot_entries
        try:
            snapshot = raft.snapshot(self._applied, self._machine.snapshot())
        except Exception as error:
            self._fail(error, "its state could not be taken")
            return

        def done(error: BaseException | None) -> None:
            if error is None:
                raft.compact(snapshot)
            elif isinstance(error, StorageError) and not isinstance(error, LogFailedError):
                _LOG.warning("%s goes on with a long log: %s", self.id, error)
            else:
                self._fail(error, "its log could not be made shorter")

        self._work(lambda: self._wal.compact(snapshot), done)

    # ------------------------------------------------------------ what has changed

    def _look_at(self) -> _Seen:
        raft = self._raft
        return raft.role, raft.term, raft.leader, raft.log.members

    def _tell_changes(self) -> None:
        before, self._seen = self._seen, self._look_at()
        if before == self._seen:
            return
        if before[:2] != self._seen[:2]:
            self._lead_changed()
        try:
            self._changed()
        except Exception:
            _LOG.exception("%s: who was told of a change has failed", self.id)

    def _lead_changed(self) -> None:
        """The role or the term is another one: what we proposed and is not committed, is not ours any more."""
        raft = self._raft
        self._heard.clear()
        if self._moving is not None:
            self._moving.cancel()
            self._moving = None
        for index, (term, future) in list(self._proposals.items()):
            leads = raft.role is Role.LEADER and raft.term == term
            if not leads and not (index <= raft.commit and raft.log.has(index, term)):
                del self._proposals[index]
                _refuse(future, _lost(index, f"{self.id} does not lead any more"))


def _lost(index: int, why: str, cause: BaseException | None = None) -> LostProposalError:
    lost = LostProposalError(
        f"nobody here knows whether entry {index} will be applied: {why}. See what has become of it, then try again."
    )
    lost.__cause__ = cause
    return lost


def _refuse(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
