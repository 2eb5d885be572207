"""Participant of the two-phase commit: transactions of flows from their first byte to the target. No sockets.

A transaction goes through these states::

    open       bytes arrive; nothing is promised
    prepared   the sink has voted yes: the data is complete and on disk, and the target can take it
    decided    the transaction will be committed, whatever happens
    committed  the target has the records; the sink remembers the id
    (aborted)  the transaction is forgotten

| | unknown | open | prepared | decided | committed |
|---|---|---|---|---|---|
| begin | → open | its length | its length | its length | 0 |
| data | error | appended | dropped | dropped | dropped |
| prepare | no | yes → prepared, or no → unknown | yes, if the numbers are the same | yes | yes |
| commit | error: lost | error: lost | → decided → committed | → committed | nothing to do |
| abort | nothing to do | → unknown | → unknown | error | error |

Rules:

1. `ledger.py` says what is on disk at which point, so that every promise holds.
2. `commit` writes the decision to disk, then lets the target apply the transaction, then notes that the target did.
   Transactions that were decided when a process died are applied by the next process, in the same order, before any
   other transaction of their flow and step. A transaction that the target refuses waits, and later transactions of its
   flow and step wait behind it; other flows and steps continue.
3. A committed transaction is remembered, so that a commit may be repeated, from any process. The last `KEPT_IDS` of
   each step are remembered: a snapshot has far fewer tokens, and a commit is repeated only as long as its token is in
   the latest snapshots. A commit of a forgotten transaction is reported as lost, and never applied twice.
4. A commit of a transaction that is neither prepared nor remembered is an error: output is lost; the flow must know.
5. A job calls `uncommitted` when a generation begins. All transactions of that generation and of older ones are left
   over from processes that are gone, and the caller aborts them. (Those of the same generation too: if the flow's
   snapshots were deleted, it counts its generations from the start.) From then on transactions of older generations are
   refused, so a process that should be dead learns it soon. A lower generation is accepted for the same reason.
6. **Order.** A commit first commits the transactions of the same job, step and generation that were prepared for an
   *earlier snapshot*. So output appears in the order of snapshots, though workers commit independently, at any time.

   Why this is allowed: tokens have the numbers of snapshots. A token is committed after a manifest that contains it is
   safe (duty 1 in `flows/sink.py`), and that manifest is not older than the number. A snapshot gets a manifest, or
   fails, only after every worker has reported all it has prepared; and a reported token is in every manifest from then
   on until it is committed (duty 2). So when a worker commits a transaction of snapshot n, every transaction that was
   prepared for an earlier snapshot is in that manifest or was committed before: it is certain to be committed, and
   only its turn is decided here.

   One exception: a worker that joins after a snapshot and leaves before the next does not know the numbers, and hands
   over with number 1. Its output belongs to the *next* snapshot, while other workers may still commit the last one. By
   its own number the output would be committed with that last snapshot, too early: if the flow then went back, the
   output would appear twice. So a number smaller than one prepared before is not believed: its turn is right after all
   turns prepared before, and before the next snapshot. The output cannot belong to an earlier snapshot: a snapshot
   begins when the previous one is over, and a worker hands over between the two, for the next snapshot that succeeds.
   Only transactions of a *smaller* turn go first; those of the same turn each wait for their own commit. (Number 1 is
   not smaller than 1: output from after a flow's very first snapshot may appear before parts of it; never twice.)
7. The transactions that go first are ordered by turn, and within a turn by their votes.
8. A transaction that belongs to no snapshot (`alone`) has no order and is not listed. If its writer does not come back
   within a day, the transaction is deleted.
9. **Doubt.** After a failed call of the target, or a process that died in the call, it is open whether the target has
   the transaction. The target knows, but remembers only the last `REMEMBERED_TRANSACTIONS` of all flows. So before that
   many are applied, the target is asked, with records that cannot be read: if it does not try to read them, it has the
   transaction. This also settles a transaction whose file is gone because it was applied.
10. **Jobs.** Two jobs of one flow have two snapshot directories, and a transaction has the identity of its job's
   directory (`store`). Queues, fences, turns and leftovers belong to one flow, step and job: a job never commits,
   aborts or fences a transaction of another job. A transaction of an older Railgun has no identity, and its job is
   unknown. So it is committed by its token, and otherwise left alone: a job with an identity neither aborts it nor is
   refused because of it (the job's own output is sent again, and would collide in a table with keys). People may drop
   it (`railgun sink drop`) once every job of its flow has started again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from railgun.errors import RailgunError
from railgun.ingest.errors import LostError, MisuseError, SinkError
from railgun.sinkserver.ledger import ID, Ledger, Step, Txn, job_of
from railgun.sinkserver.staged import Absent, Staged
from railgun.sinkserver.targets import REMEMBERED_TRANSACTIONS, Target, TargetError

MAX_REFUSALS: Final = 1000
TURNS_PER_SNAPSHOT: Final = 1 << 20
MAX_NAME_CHARS: Final = 1000
MAX_TEXT_CHARS: Final = 2000
SWEEP_INTERVAL_S: Final = 3600.0


class Participant:
    """The transactions in a directory, and the target that applies them. Not thread-safe: one thread at a time."""

    def __init__(self, directory: Path, target: Target) -> None:
        self.directory = directory
        self.target = target
        self.ledger = Ledger(directory)
        self.txns = self.ledger.txns
        self.records = 0
        """Records that were committed since the start."""
        self.commits = 0
        # Transactions applied since the doubts were resolved; at this value they are resolved first.
        self._applied = REMEMBERED_TRANSACTIONS // 2
        self._refused: dict[
            str, tuple[str, str]
        ] = {}  # code and text of the last votes of no, by id
        self._swept = time.monotonic()

    # ------------------------------------------------------------ start and end

    def open(self) -> list[str]:
        """Read the ledger, open the target and apply what was decided; return notes on what was found."""
        notes = self.ledger.open()
        try:
            self.ledger.set_target(target_name(self.target))
            self.target.sink = self.ledger.sink
            self.target.open()
        except BaseException:
            self.ledger.close()
            raise
        queues = self.ledger.queues
        if queues:
            count = sum(map(len, queues.values()))
            notes.append(f"{count} transactions were decided on, and are applied now")
        for origin in list(queues):
            try:
                self.finish(origin)
            except Exception as error:
                notes.append(f"transactions of {job_of(origin)} wait: {error}")
        return notes

    def close(self) -> None:
        """Close the ledger and the target; all transactions stay on disk."""
        self.ledger.close()
        self.target.close()

    # ------------------------------------------------------------ bytes

    def begin(
        self,
        id: str,
        flow: str,
        step: str,
        generation: int,
        worker: int,
        alone: bool = False,
        store: str = "",
    ) -> int:
        """Begin or continue a transaction; return how many of its bytes are on disk here."""
        if not ID.fullmatch(id) or max(map(len, (flow, step, store))) > MAX_NAME_CHARS:
            raise MisuseError("BAD_TXN", f"{id[:40]!r} of {flow[:40]!r} is no transaction")
        txn = self.txns.get(id)
        if txn is not None:
            if (*txn.origin, txn.generation) != (flow, step, store, generation):
                raise MisuseError("BAD_TXN", f"transaction {id} is of {job_of(txn.origin)}")
            return txn.end
        if self.ledger.is_committed(id):
            return 0
        self._check_refused(id)
        self._check_fence((flow, step, store), generation, alone)
        if time.monotonic() - self._swept > SWEEP_INTERVAL_S:
            self._swept = time.monotonic()
            self.ledger.sweep()
        self.ledger.begin(
            id,
            flow=flow,
            step=step,
            store=store,
            generation=generation,
            worker=worker,
            alone=alone,
        )
        return 0

    def data(self, id: str, start: int, data: bytes | bytearray | memoryview) -> int:
        """Append the bytes of a transaction that begin at byte `start`; return its length then.

        Raise `MisuseError` if the transaction has not begun, or if bytes before `start` are missing.
        """
        txn = self.txns.get(id)
        if txn is None:
            raise MisuseError("UNKNOWN", f"transaction {id[:40]!r} has not begun here")
        if txn.state != "open" or not data or start + len(data) <= txn.end:
            return txn.end  # a repeated call
        if start != txn.end:
            raise MisuseError(
                "BAD_OFFSET",
                f"transaction {id} has {txn.end:,} bytes here, and these are from {start:,} on",
            )
        assert txn.log is not None
        txn.log.append(data)
        txn.end = txn.log.end
        return txn.end

    # ------------------------------------------------------------ the two phases

    def prepare(self, id: str, snapshot: int, end: int, count: int) -> None:
        """Vote on a transaction: return for yes; for no, delete the transaction and raise `SinkError` or `TargetError`.

        `end` is the number of its bytes, `count` that of its records, as the flow has sent them.
        """
        txn = self.txns.get(id)
        if txn is None and self.ledger.is_committed(id):
            return
        if txn is None:
            self._check_refused(id)
            raise SinkError("UNKNOWN", f"transaction {id[:40]!r} has not begun here")
        if txn.state != "open":
            if (txn.snapshot, txn.end, txn.count) != (snapshot, end, count):
                raise SinkError("BAD_TXN", f"transaction {id} was prepared with other numbers")
            return
        try:
            self._prepare(txn, snapshot, end, count)
        except BaseException as error:
            self.ledger.drop(txn)
            if isinstance(error, RailgunError):
                code = str(getattr(error, "code", "FAILED"))
                self._refused[id] = code, shorten(str(error))
                if len(self._refused) > MAX_REFUSALS:
                    del self._refused[next(iter(self._refused))]
            raise

    def _check_refused(self, id: str) -> None:
        """Raise the error of an earlier vote of no again, for a flow that has not received it."""
        if id in self._refused:
            raise SinkError(*self._refused[id])

    def _prepare(self, txn: Txn, snapshot: int, end: int, count: int) -> None:
        self._check_fence(txn.origin, txn.generation, txn.alone)
        if txn.end != end:
            raise SinkError(
                "SHORT",
                f"transaction {txn.id} has {txn.end:,} bytes here, and {end:,} were announced",
            )
        assert txn.log is not None
        records = txn.log.records()
        try:
            records_here = sum(map(len, records.batches()))
        except ValueError as error:
            raise SinkError("BAD_RECORDS", f"transaction {txn.id}: {error}") from error
        if records_here != count:
            raise SinkError(
                "BAD_RECORDS",
                f"transaction {txn.id} has {records_here:,} records here, and {count:,} were announced",
            )
        turn = turn_of(snapshot, [peer.turn for peer in self._peers(txn)])
        with self._target_errors():
            first, others = self._promised_beside(txn, turn)
            self.target.check_beside(records, first, others)
        txn.snapshot, txn.count, txn.turn = snapshot, count, turn
        self.ledger.prepare(txn)

    def commit(self, id: str) -> None:
        """Commit a transaction, after those that must come first (rule 6); repeat it safely.

        Raise `LostError` if it is neither prepared nor known as committed.
        """
        txn = self.txns.get(id)
        if txn is None and self.ledger.is_committed(id):
            return
        if txn is None or txn.state == "open":
            raise LostError(
                "LOST",
                f"transaction {id[:40]!r} is to be committed, and is neither prepared here nor known as committed",
            )
        if txn.state == "prepared":
            earlier = [peer for peer in self._peers(txn) if peer.turn < txn.turn]
            # Sorting is stable: transactions of one turn stay in the order of their votes.
            decided = [*sorted(earlier, key=lambda peer: peer.turn), txn]
            for member in decided:
                if member.damaged:
                    raise member.damage_error()
            self.ledger.decide(decided)
        self.finish(txn.origin)

    def finish(self, origin: Step) -> None:
        """Let the target apply the decided transactions of a flow, step and job."""
        while queue := self.ledger.queues.get(origin):
            if self._applied >= REMEMBERED_TRANSACTIONS // 2:
                self._resolve_doubts()
                continue
            txn = queue[0]
            txn.doubt = True
            with self._target_errors():
                self.target.apply(txn.id, txn.records())
            self._record_applied(txn)

    def _resolve_doubts(self) -> None:
        """Ask the target about all transactions in doubt (rule 9)."""
        for txn in [txn for queue in self.ledger.queues.values() for txn in queue if txn.doubt]:
            unread = Absent(txn.damage_error())
            try:
                with self._target_errors():
                    self.target.apply(txn.id, unread)
            except RailgunError:
                if not unread.wanted:
                    raise
            if unread.wanted:
                txn.doubt = False
            else:
                self._record_applied(txn)
        self._applied = 0

    def _record_applied(self, txn: Txn) -> None:
        """Note that the target has a transaction. The next synced entry makes the note safe; until then the target
        remembers."""
        self._applied += 1
        self.records += txn.count
        self.commits += 1
        self.ledger.committed(txn, sync=self._applied >= REMEMBERED_TRANSACTIONS // 2)

    def abort(self, id: str) -> None:
        """Delete a transaction; raise `SinkError` if it is decided or committed."""
        txn = self.txns.get(id)
        if self.ledger.is_committed(id) or (txn is not None and txn.state == "decided"):
            raise SinkError("COMMITTED", f"transaction {id} is committed, and cannot be aborted")
        if txn is not None:
            self.ledger.drop(txn)

    def uncommitted(self, flow: str, step: str, generation: int, store: str = "") -> list[Txn]:
        """Fence older generations of a job, and return what it has left over of them and of this one."""
        origin = flow, step, store
        self.ledger.fence(origin, generation)
        return [
            txn
            for txn in self.txns.values()
            if txn.origin == origin
            and not txn.alone
            and txn.generation <= generation
            and txn.state != "decided"
        ]

    # ------------------------------------------------------------ internals

    def _peers(self, txn: Txn) -> list[Txn]:
        """Return the other prepared transactions of the same job, step and generation, in the order of votes."""
        if txn.alone:
            return []
        mine = (*txn.origin, txn.generation)
        return [
            peer
            for peer in self.txns.values()
            if peer.state == "prepared"
            and not peer.alone
            and (*peer.origin, peer.generation) == mine
            if peer is not txn
        ]

    def _promised_beside(self, txn: Txn, turn: int) -> tuple[dict[str, Staged], ...]:
        """Return the records of transactions certainly applied before this one, in order; and of those that may
        be applied before it or after.

        A transaction that was prepared alone may be neither: if its writer is gone it is never committed, and the same
        records are sent again.
        """
        waiting = [p for p in self.txns.values() if p.state == "decided" or not p.alone]
        first = [*self.ledger.queues.get(txn.origin, ())]
        first += sorted((p for p in self._peers(txn) if p.turn < turn), key=lambda p: p.turn)
        first_ids = {p.id for p in first}
        others = [
            p
            for p in waiting
            if p.state != "open" and p.id not in first_ids and not _may_be_left_by(txn, p)
        ]
        return tuple(
            {p.id: p.log.records() for p in txns if p.log is not None and not p.damaged}
            for txns in (first, others)
        )

    def _check_fence(self, origin: Step, generation: int, alone: bool) -> None:
        fence = self.ledger.fences.get(origin, generation)
        if not alone and generation < fence:
            raise SinkError(
                "STALE", f"{job_of(origin)}: generation {generation} is over, and {fence} has begun"
            )

    @contextlib.contextmanager
    def _target_errors(self) -> Iterator[None]:
        """Turn any error that the target raises into a `TargetError`."""
        try:
            yield
        except RailgunError:
            raise
        except Exception as error:
            raise TargetError(
                f"{type(self.target).__name__}: {type(error).__name__}: {error}"
            ) from error


def _may_be_left_by(txn: Txn, older: Txn) -> bool:
    """Return whether `older` may be what the job of `txn` has left behind before it had an identity (rule 10)."""
    return (
        bool(txn.store) and older.state == "prepared" and older.origin == (txn.flow, txn.step, "")
    )


def target_name(target: Target) -> str:
    """Return a name of the target that is the same after a restart."""
    kind = type(target)
    return kind.__qualname__ if kind.__str__ is object.__str__ else str(target)


def shorten(text: str) -> str:
    """Cut a text so that it fits into any answer.

    >>> shorten("short"), len(shorten("x" * 10_000_000))
    ('short', 2001)
    """
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…"


def turn_of(snapshot: int, before: list[int]) -> int:
    """Return the turn of a transaction prepared for this snapshot, given the turns that wait (rule 6).

    >>> of_snapshot_56 = 56 * TURNS_PER_SNAPSHOT
    >>> def parts(turn): return divmod(turn, TURNS_PER_SNAPSHOT)
    >>> parts(turn_of(56, [])), parts(turn_of(56, [of_snapshot_56])), parts(turn_of(57, [of_snapshot_56]))
    ((56, 0), (56, 0), (57, 0))
    >>> parts(turn_of(1, [of_snapshot_56])), parts(turn_of(1, [of_snapshot_56, of_snapshot_56 + 1]))  # twice
    ((56, 1), (56, 2))
    """
    last = max(before, default=0)
    return snapshot * TURNS_PER_SNAPSHOT if snapshot >= last // TURNS_PER_SNAPSHOT else last + 1
