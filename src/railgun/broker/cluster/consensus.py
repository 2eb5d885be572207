"""Drive a Raft machine: its clock, its disk, its messages, and the callers that wait for results.

The machine (`broker.protocol.raft`) decides, the log (`wal`) persists, and the caller's `Machine` applies what was
committed.

Rules:

1. Everything runs in one event loop, except writing: a thread of its own writes one `Ready` after the other, so the
   loop never waits for a disk. What is decided meanwhile goes into the next `Ready`: many proposals, one sync.
2. Entries are applied in the order of the log, the same on every node. The result of applying an entry is returned to
   its proposer on this node. An entry without data is not applied.
3. A proposal ends with its result, with `NotLeaderError` (it is in no log), or with `LostProposalError` (this node does
   not know whether it will be applied): the leadership was lost, or this node ended, before the entry was known to be
   committed.
4. A barrier returns when everything that was committed anywhere before it began is applied here. It repeats its
   question until its timeout. Numbers of reads begin at a random number: an answer to a node that was killed must not
   be taken for an answer to its successor.
5. A failed write is final: nothing counts as persisted, all waiting callers get the error, and so does the owner, once
   (`failed`). The same holds if the machine raises. The node starts again from its disk, or not at all. If the disk has
   only refused the write, `probe` tells when it accepts writes again.
6. After `snapshot_entries` applied entries the log is compacted, between two writes: the state is taken in the loop,
   and written by the thread. If there is no room for that, it is tried again later.
7. An invalid message of a peer is skipped and logged. What `send` cannot send is lost: Raft tolerates that.
8. Leases that `lease_left` has returned are kept: a transfer begins when the last of them has ended, and no lease is
   returned meanwhile.
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

MAX_PROPOSAL_BYTES: Final = 4 << 20
"""Bytes of the largest proposal: a message with it fits into a frame."""
_LOG: Final = logging.getLogger(__name__)


class LostProposalError(RailgunError):
    """The outcome of a proposal is unknown: it may be applied, now or later, or never."""

    code: ClassVar[str] = "FATE_UNKNOWN"


class NoLeaderError(RailgunError):
    """No leader could confirm what is committed; nothing has changed."""

    code: ClassVar[str] = "NO_LEADER"


class TooLargeError(RailgunError):
    """A proposal does not fit into a message: it is in no log."""

    code: ClassVar[str] = "TOO_LARGE"


class Machine(Protocol):
    """The replicated state machine. It is called in the event loop, in log order, with the same results on every
    node."""

    def apply(self, index: int, data: bytes) -> Any:
        """Apply an entry. The result goes to the proposer on this node. Must not raise, whatever `data` is."""
        ...

    def snapshot(self) -> bytes:
        """Return the state after all applied entries."""
        ...

    def restore(self, index: int, data: bytes) -> None:
        """Replace the state by that of a snapshot, whose last entry is `index`."""
        ...


@dataclass(eq=False, slots=True)
class _Barrier:
    done: asyncio.Future[None]
    answered: asyncio.Future[None]  # done when the leader has answered
    index: int | None = None  # the index to be applied, once it is known


_Observed: TypeAlias = tuple[Role, int, str | None, Members]


class Consensus:
    """The consensus of one node: call `open`, `start`, and at the end `close`. See the rules of the module."""

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
        self.had_log = False
        """Whether the directory held a log before `open`."""
        self.error: RailgunError | None = None
        """The error that has ended it, or None."""
        self._disk, self._directory = disk, directory
        self._machine, self._send, self._clock = machine, send, clock
        # A seed per node: nodes must not all wait equally long.
        self._seed = seed ^ zlib.crc32(id.encode())
        self._snapshot_entries, self._changed, self._failed = snapshot_entries, changed, failed
        self._opened_raft: Raft | None = None
        self._wal: Wal
        self._missing = False  # whether the file was gone at the last check
        self._applied = 0
        self._compact_at = snapshot_entries
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="railgun-raft")
        self._ended = False
        self._busy = False  # whether the thread has work
        # Done when the thread has no work, for `close`.
        self._idle: asyncio.Future[None] | None = None
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._observed: _Observed
        # By index: the term and the result.
        self._proposals: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        self._reads: dict[int, _Barrier] = {}
        self._numbers = itertools.count(secrets.randbits(62))
        self._waiting: list[tuple[int, int, _Barrier]] = []  # a heap, by the index to be applied
        self._heard: dict[str, float] = {}
        self._lease_promised_until = float("-inf")  # the end of the last lease that was returned
        self._moving: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Consensus({self._opened_raft or self.id})"

    # ------------------------------------------------------------ its life

    def open(self, first: Members | None = None) -> list[str]:
        """Read the log, or begin a log with the members `first`. Return warnings for people. Blocks on the disk.

        A new node without members waits for a leader to tell it the members.
        """
        self._wal, recovered = Wal.open(self._disk, self._directory)
        snapshot = recovered.snapshot
        self.had_log = snapshot is not None
        if snapshot is None:
            snapshot = Snapshot(0, 0, first or Members(()))
            self._wal.write(None, snapshot, ())
            self._wal.sync()
        if snapshot.index:
            self._machine.restore(snapshot.index, snapshot.data)
        self._opened_raft = Raft(
            self.id,
            self.settings,
            self._clock(),
            snapshot=snapshot,
            hard=recovered.hard,
            entries=recovered.entries,
            seed=self._seed,
        )
        self._applied = snapshot.index
        self._compact_at = snapshot.index + self._snapshot_entries
        self._observed = self._observe()
        return recovered.warnings

    def start(self) -> None:
        """Take part in the cluster, in the running event loop."""
        assert self._opened_raft is not None, "open comes first"
        self._loop = asyncio.get_running_loop()
        self._act()

    def check_files(self) -> None:
        """End this node's part if its log file was removed, for the node would forget its promises from now on.

        Call it regularly: the file has to be missing twice, because another thread replaces it.
        """
        missing = not self._ended and not self._wal.has_file()
        if missing and self._missing:
            what = f"{self._disk.where(self._directory)} was removed"
            self._fail(
                LogFailedError(
                    f"{what}: this node takes no part in the cluster any more. Replace the node."
                ),
                what,
            )
        self._missing = missing

    async def probe(self) -> None:
        """Check whether the log can be written after a refused write. Raise that write's error if it still cannot."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._wal.probe)

    async def close(self) -> None:
        """Take no more part. A write under way is finished, and waiting callers get an error."""
        self._end(None)
        if self._busy and self._loop is not None:
            self._idle = self._idle or self._loop.create_future()
            await self._idle
        self._thread.shutdown(wait=False)
        if self._opened_raft is not None:
            try:
                await asyncio.to_thread(self._wal.close)
            except StorageError as error:  # everything that others rely on was synced before
                _LOG.warning("%s could not close its log: %s", self.id, error)

    def abandon(self) -> None:
        """Stop at once, as if the process were killed: nothing more is written, sent or applied."""
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
            _refuse(future, _lost_proposal(index, why, error))
        barriers = {*self._reads.values(), *(barrier for _, _, barrier in self._waiting)}
        self._reads, self._waiting = {}, []
        for barrier in barriers:
            _refuse(barrier.done, error or ClosedError(why))

    def _fail(self, error: BaseException, what: str) -> None:
        if self._ended:
            return
        if not isinstance(error, RailgunError):
            _LOG.error("%s: %s", self.id, what, exc_info=error)
            failure = LogFailedError(
                f"{self.id} has ended: {what}: {error!r}. Start the node again."
            )
            failure.__cause__ = error
            error = failure
        self._end(error)
        try:
            self._failed(error)
        except Exception:
            _LOG.exception("%s has failed, and so has its callback `failed`", self.id)

    def _check(self) -> Raft:
        if self._ended:
            why = f": {self.error}" if self.error is not None else ""
            raise ClosedError(
                f"{self.id} takes no part in the cluster any more{why}"
            ) from self.error
        if self._loop is None:
            raise ClosedError(f"{self.id} has not started yet")
        return self._raft

    # ------------------------------------------------------------ state

    @property
    def _raft(self) -> Raft:
        assert self._opened_raft is not None, "open comes first"
        return self._opened_raft

    @property
    def leader(self) -> str | None:
        """The ID of the leader, or None if it is unknown."""
        return self._raft.leader

    @property
    def leads(self) -> bool:
        """Whether this node is the leader, as far as it knows."""
        return not self._ended and self._raft.role is Role.LEADER

    @property
    def term(self) -> int:
        """The current Raft term."""
        return self._raft.term

    @property
    def members(self) -> Members:
        """The members by the last change in the log, committed or not."""
        return self._raft.log.members

    @property
    def commit(self) -> int:
        """The last index known to be committed."""
        return self._raft.commit

    @property
    def applied(self) -> int:
        """The last applied index."""
        return self._applied

    @property
    def knows_all(self) -> bool:
        """Whether this node leads, and has applied everything committed before its term."""
        return self.leads and self._applied >= self._raft.began

    @property
    def last_index(self) -> int:
        """The last index of the log."""
        return self._raft.log.last

    def lease_left(self) -> float:
        """Return for how many seconds from now no other node can lead, or 0.0 if that is unknown."""
        raft, now = self._raft, self._clock()
        if not self.leads or self._moving is not None or raft.moving is not None:
            return 0.0
        if not raft.has_lease(now):
            return 0.0
        assert self.settings.lease is not None
        until = raft.confirmed + self.settings.lease
        self._lease_promised_until = max(self._lease_promised_until, until)
        return until - now

    def heard(self, node: str) -> float | None:
        """Return when `node` last answered this leader, by its clock; None without an answer, or if this node does
        not lead."""
        return self._heard.get(node) if self.leads else None

    # ------------------------------------------------------------ messages, proposals, reads

    def step(self, sender: str, message: Message) -> None:
        """Take a message of another node."""
        if self._ended or self._loop is None:
            return
        raft, now = self._raft, self._clock()
        try:
            raft.step(sender, message, now)
        except ProtocolError as error:
            _LOG.error("%s skips an invalid message of %s: %s", self.id, sender, error)
        except Exception as error:
            self._fail(error, f"a message of {sender} could not be handled")
            return
        if isinstance(message, Appended | Installing) and message.term == raft.term:
            self._heard[sender] = now
        self._act()

    async def propose(self, data: bytes) -> Any:
        """Propose an entry. Return the machine's result once it is applied here; see rule 3 for the errors."""
        raft = self._check()
        if len(data) > MAX_PROPOSAL_BYTES:
            raise TooLargeError(
                f"an entry of {len(data):,} bytes is too large: {MAX_PROPOSAL_BYTES:,} at most. Split it."
            )
        return await self._wait_applied(*raft.propose([data], self._clock()))

    async def change(self, members: Members) -> None:
        """Change the members. Return when the change is committed. Raise `ChangeError` if it cannot be made now."""
        await self._wait_applied(*self._check().change(members, self._clock()))

    def transfer(self, to: str) -> None:
        """Let the voter `to` lead as soon as leases allow it; `leader` shows the outcome. Raise `ChangeError` if it
        has no vote."""
        raft = self._check()
        raft.check_leads("hand over")
        if to not in raft.log.members.voters:
            raise ChangeError("NO_VOTER", f"{to} is no voter, so it cannot lead")
        if to == self.id:
            return
        assert self._loop is not None
        if self._moving is not None:
            self._moving.cancel()
        wait = max(0.0, self._lease_promised_until - self._clock())
        self._moving = self._loop.call_later(wait, self._start_transfer, to, raft.term)

    async def barrier(self, timeout: float = 2.0) -> None:
        """Return when everything committed before is applied here. Raise `NoLeaderError` after `timeout` seconds."""
        self._check()
        assert self._loop is not None
        barrier = _Barrier(self._loop.create_future(), self._loop.create_future())
        numbers = []
        deadline = self._loop.time() + timeout
        heartbeat = self.settings.heartbeat
        try:
            while (left_s := deadline - self._loop.time()) > 0 and not barrier.done.done():
                if barrier.index is not None:
                    await asyncio.wait([barrier.done], timeout=left_s)
                    continue
                # Any answer will do: all questions were asked after the barrier began.
                numbers.append(number := next(self._numbers))
                self._reads[number] = barrier
                answered = barrier.answered = self._loop.create_future()
                self._raft.read(number, self._clock())
                self._act()
                both, pause = (barrier.done, answered), min(left_s, 2 * heartbeat)
                await asyncio.wait(both, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if answered.done() and barrier.index is None:
                    await asyncio.wait([barrier.done], timeout=min(left_s, heartbeat / 2))
            if barrier.done.done():
                return barrier.done.result()
            if barrier.index is not None:
                raise NoLeaderError(
                    f"{self.id} has applied {self._applied}, not {barrier.index}, after {timeout} s: try again"
                )
            raise NoLeaderError(
                f"{self.id} found no leader with a majority within {timeout} s: try again"
            )
        finally:
            for number in numbers:
                self._reads.pop(number, None)
            self._waiting = [waiting for waiting in self._waiting if waiting[2] is not barrier]
            heapq.heapify(self._waiting)

    async def _wait_applied(self, term: int, index: int) -> Any:
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        self._proposals[index] = term, future
        self._act()
        return await future

    def _start_transfer(self, to: str, term: int) -> None:
        self._moving = None
        raft = self._raft
        if not self._ended and raft.role is Role.LEADER and raft.term == term:
            try:
                raft.transfer(to, self._clock())
            except RailgunError as error:
                _LOG.warning("%s cannot transfer the leadership: %s", self.id, error)
            self._act()

    # ------------------------------------------------------------ driving the machine

    def _act(self) -> None:
        """Schedule the work that an event has caused, after all other events of this turn of the loop."""
        if self._ended or self._loop is None:
            return
        if not self._scheduled and not self._busy:
            self._scheduled = True
            self._loop.call_soon(self._pump)
        self._set_timer()
        self._report_changes()

    def _set_timer(self) -> None:
        """Set the timer to the machine's next due time. Keep an earlier timer: it costs less than a new one for each
        message."""
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
                self._fail(error, "its timer could not be handled")
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
            self._report_changes()

    def _work(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Run `work` in the thread, and then `done` in the event loop."""
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                # Work that was cancelled before it began counts as done, too: `close` waits for it.
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
        """Finish a `Ready` that is on disk: send, restore and apply."""
        try:
            self._raft.persisted(ready, self._clock())
            self._send_all(ready.late)
            if ready.snapshot is not None:
                self._restore(ready.snapshot)
            for entry in ready.committed:
                self._apply(entry)
        except Exception as error:
            self._fail(error, "committed entries could not be applied")
            return
        for number, index in ready.reads:
            if (barrier := self._reads.pop(number, None)) is not None:
                self._take_read_index(barrier, index)
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
            _refuse(future, _lost_proposal(index, "a snapshot covers its index"))

    def _apply(self, entry: Entry) -> None:
        result = self._machine.apply(entry.index, entry.data) if entry.data else None
        self._applied = entry.index
        term, future = self._proposals.pop(entry.index, (0, None))
        if future is None or future.done():
            return
        if term == entry.term:
            future.set_result(result)
        else:
            _refuse(future, _lost_proposal(entry.index, "another entry has its place"))

    def _take_read_index(self, barrier: _Barrier, index: int | None) -> None:
        if not barrier.answered.done():
            barrier.answered.set_result(None)
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
                _LOG.warning(
                    "%s could not compact its log, and goes on without: %s", self.id, error
                )
            else:
                self._fail(error, "its log could not be compacted")

        self._work(lambda: self._wal.compact(snapshot), done)

    # ------------------------------------------------------------ changes of role

    def _observe(self) -> _Observed:
        raft = self._raft
        return raft.role, raft.term, raft.leader, raft.log.members

    def _report_changes(self) -> None:
        before, self._observed = self._observed, self._observe()
        if before == self._observed:
            return
        if before[:2] != self._observed[:2]:
            self._lead_changed()
        try:
            self._changed()
        except Exception:
            _LOG.exception("%s: the callback `changed` has failed", self.id)

    def _lead_changed(self) -> None:
        """Fail the proposals of this node that were not committed before its role or term changed."""
        raft = self._raft
        self._heard.clear()
        if self._moving is not None:
            self._moving.cancel()
            self._moving = None
        for index, (term, future) in list(self._proposals.items()):
            leads = raft.role is Role.LEADER and raft.term == term
            if not leads and not (index <= raft.commit and raft.log.has(index, term)):
                del self._proposals[index]
                _refuse(future, _lost_proposal(index, f"{self.id} does not lead any more"))


def _lost_proposal(index: int, why: str, cause: BaseException | None = None) -> LostProposalError:
    lost = LostProposalError(
        f"this node does not know whether entry {index} will be applied: {why}. Check the result before you try again."
    )
    lost.__cause__ = cause
    return lost


def _refuse(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
