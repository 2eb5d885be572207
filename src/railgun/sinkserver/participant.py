"""The participant: transactions of flows on disk, from their first byte to the target. Plain calls, no sockets.

A transaction goes through these states::

    open       its bytes come; nothing is promised
    prepared   the sink has voted yes: it is whole, safe, and the target can take it
    decided    it is to be committed, whatever happens
    committed  the target has it; its id is remembered
    (aborted)  as if it had never been

| | unknown | open | prepared | decided | committed |
|---|---|---|---|---|---|
| begin | → open | where it ends | where it ends | where it ends | 0 |
| data | error | taken | dropped | dropped | dropped |
| prepare | no | yes → prepared, or no → unknown | yes, if it is the same | yes | yes |
| commit | error: lost | error: lost | → decided → committed | → committed | nothing to do |
| abort | nothing to do | → unknown | → unknown | error | error |

Rules:

1. What is on disk when, so that promises hold, is told in `ledger.py`.
2. `commit`: first the decision is written down, then the target applies it, then that it did. What was decided when a
   process died is applied by the next one, in the same order, before anything else of its flow and step is. What the
   target refuses waits, and whatever its flow and step commits later waits behind it; others go on.
3. A committed transaction is remembered, so that a commit may come again, from any process. Of each step the last
   `KEPT` are: the tokens of one snapshot are far fewer, and a commit is repeated only as long as its token is in
   the latest snapshots. One that was forgotten is reported lost, never applied twice.
4. A commit of what is neither prepared nor remembered is an error: output is lost, and the flow must know.
5. `uncommitted` is asked for when a generation begins. All there is of it and of older ones is left over from processes
   that are gone, and its caller aborts it. (Of the same generation too: if the flow's snapshots were deleted, it
   counts its generations anew.) From then on nothing of an older generation is taken, so a process that is not quite
   dead learns it soon. A lower number than before is believed, for the same reason.
6. **Order.** A commit first commits what is prepared of the same job, step and generation and was prepared for an
   *earlier snapshot*. So output comes in the order of snapshots, though workers publish on their own, at any time.

   Why that may be done: the numbers of tokens are those of snapshots. A token is committed after a manifest that holds
   it is safe (duty 1 in `flows/sink.py`), and that manifest is not older than the number. A snapshot gets a manifest,
   or fails, only after every worker has told all it has prepared; and what one has told is in every manifest from then
   on until it is committed (duty 2). So if somebody commits what was prepared for snapshot n, all that was prepared for
   an earlier one is in that manifest or was committed before: it is certain to be committed, and only its turn is
   decided here.

   One exception: a worker that joined after a snapshot, and leaves before the next, does not know what the numbers
   are, and hands over with number 1. What it hands over belongs to the *next* snapshot, while others may still commit
   the last. By its own number it would be committed with that one, too early: if the flow then went back, it would come
   twice. So a number that is smaller than one prepared before it is not believed: its turn is right after all that were
   prepared before, and before the next snapshot. It cannot have belonged to an earlier one: a snapshot begins when
   the one before is over, and a worker hands over between the two, for the next that comes about.
   Only what has a *smaller* turn goes first; of the same turn, each waits for its own commit. (Number 1 is not smaller
   than 1. What is handed over after a flow's very first snapshot may come before parts of it; never twice.)
7. Those that go first do so by their turns, and within one in the order of their votes.
8. What belongs to no snapshot (`alone`) has no order and is not listed. If its writer never comes back it is thrown
   away after a day.
9. **Doubt.** A call of the target that failed, or a process that died in it, leaves open whether the target has the
   transaction. The target knows, but remembers only the last `REMEMBERED`, of all flows. So before that many are
   applied it is asked, with records that cannot be read: if it does not want to read them, it has the transaction. This
   is also how one is found whose file is gone, because it was applied.
10. **Jobs.** Two jobs of one flow have two snapshot directories, and a transaction bears the identity of its own
   (`store`). Queues, fences, turns and what is left over are all of one flow, step and job: nothing that one job does
   commits, aborts or fences what is another's. A transaction of an older Railgun has no identity, and nobody knows
   whose it is. So it is committed by its token, and otherwise left alone: a job that has an identity neither aborts it
   nor is refused because of it (its own output comes again, and would collide in a table with keys). People may drop
   it (`railgun sink drop`) when every job of its flow has started once.
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
from railgun.sinkserver.targets import REMEMBERED, Target, TargetError

REFUSED: Final = 1000
GAP: Final = 1 << 20  # turns between two snapshots
LONGEST_NAME: Final = 1000
LONGEST_TEXT: Final = 2000
_HOUR: Final = 3600.0


class Participant:
    """All transactions in a directory. One thread at a time."""

    def __init__(self, directory: Path, target: Target) -> None:
        self.directory = directory
        self.target = target
        self.ledger = Ledger(directory)
        self.txns = self.ledger.txns
        self.records = 0
        """Records that were committed since the start."""
        self.commits = 0
        self._applied = REMEMBERED // 2  # since the target was asked about all that is in doubt
        self._refused: dict[str, tuple[str, str]] = {}  # the last that got a no: code and text
        self._swept = time.monotonic()

    # ------------------------------------------------------------ start and end

    def open(self) -> list[str]:
        """Read what is there; what there is to tell of it."""
        told = self.ledger.open()
        try:
            self.ledger.belong_to(name_of(self.target))
            self.target.sink = self.ledger.sink
            self.target.open()
        except BaseException:
            self.ledger.close()
            raise
        queues = self.ledger.queues
        if queues:
            count = sum(map(len, queues.values()))
            told.append(f"{count} transactions were decided on, and are applied now")
        for of in list(queues):
            try:
                self.finish(of)
            except Exception as error:
                told.append(f"those of {job_of(of)} wait: {error}")
        return told

    def close(self) -> None:
        """Leave everything as it is."""
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
        """A transaction begins, or goes on; how many bytes of it are here."""
        if not ID.fullmatch(id) or max(map(len, (flow, step, store))) > LONGEST_NAME:
            raise MisuseError("BAD_TXN", f"{id[:40]!r} of {flow[:40]!r} is no transaction")
        txn = self.txns.get(id)
        if txn is not None:
            if (*txn.of, txn.generation) != (flow, step, store, generation):
                raise MisuseError("BAD_TXN", f"transaction {id} is of {job_of(txn.of)}")
            return txn.end
        if self.ledger.is_committed(id):
            return 0
        self._check_refused(id)
        self._check_fence((flow, step, store), generation, alone)
        if time.monotonic() - self._swept > _HOUR:
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
        """Bytes of a transaction come; how many are here then."""
        txn = self.txns.get(id)
        if txn is None:
            raise MisuseError("UNKNOWN", f"transaction {id[:40]!r} has not begun here")
        if txn.state != "open" or not data or start + len(data) <= txn.end:
            return txn.end  # it came before
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
        """Vote: returns for yes, raises for no, and has then thrown away what it had."""
        txn = self.txns.get(id)
        if txn is None and self.ledger.is_committed(id):
            return
        if txn is None:
            self._check_refused(id)
            raise SinkError("UNKNOWN", f"nothing is here of transaction {id[:40]!r}")
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
                self._refused[id] = code, shortened(str(error))
                if len(self._refused) > REFUSED:
                    del self._refused[next(iter(self._refused))]
            raise

    def _check_refused(self, id: str) -> None:
        """Whoever has not heard of a no hears it now."""
        if id in self._refused:
            raise SinkError(*self._refused[id])

    def _prepare(self, txn: Txn, snapshot: int, end: int, count: int) -> None:
        self._check_fence(txn.of, txn.generation, txn.alone)
        if txn.end != end:
            raise SinkError(
                "SHORT",
                f"transaction {txn.id} has {txn.end:,} bytes here, and {end:,} were announced",
            )
        assert txn.log is not None
        records = txn.log.records()
        try:
            found = sum(map(len, records.batches()))
        except ValueError as error:
            raise SinkError("BAD_RECORDS", f"transaction {txn.id}: {error}") from error
        if found != count:
            raise SinkError(
                "BAD_RECORDS",
                f"transaction {txn.id} has {found:,} records here, and {count:,} were announced",
            )
        turn = turn_of(snapshot, [one.turn for one in self._peers(txn)])
        with self._asked():
            first, others = self._promised(txn, turn)
            self.target.check_beside(records, first, others)
        txn.snapshot, txn.count, txn.turn = snapshot, count, turn
        self.ledger.prepare(txn)

    def commit(self, id: str) -> None:
        """Give it to the target, and before it what must come first."""
        txn = self.txns.get(id)
        if txn is None and self.ledger.is_committed(id):
            return
        if txn is None or txn.state == "open":
            raise LostError(
                "LOST",
                f"transaction {id[:40]!r} is to be committed, and is neither prepared here nor known as committed",
            )
        if txn.state == "prepared":
            before = [one for one in self._peers(txn) if one.turn < txn.turn]
            chosen = [*sorted(before, key=lambda one: one.turn), txn]  # of one turn: by their votes
            for one in chosen:
                if one.damaged:
                    raise one.damage()
            self.ledger.decide(chosen)
        self.finish(txn.of)

    def finish(self, of: Step) -> None:
        """Let the target apply what is decided of this flow and step."""
        while queue := self.ledger.queues.get(of):
            if self._applied >= REMEMBERED // 2:
                self._settle()
                continue
            txn = queue[0]
            txn.doubt = True
            with self._asked():
                self.target.apply(txn.id, txn.records())
            self._done(txn)

    def _settle(self) -> None:
        """Ask the target about all that is in doubt (rule 9)."""
        for txn in [one for queue in self.ledger.queues.values() for one in queue if one.doubt]:
            unread = Absent(txn.damage())
            try:
                with self._asked():
                    self.target.apply(txn.id, unread)
            except RailgunError:
                if not unread.wanted:
                    raise
            if unread.wanted:
                txn.doubt = False
            else:
                self._done(txn)
        self._applied = 0

    def _done(self, txn: Txn) -> None:
        """The target has it. The next entry that is synced makes this one safe; until then the target remembers."""
        self._applied += 1
        self.records += txn.count
        self.commits += 1
        self.ledger.committed(txn, sync=self._applied >= REMEMBERED // 2)

    def abort(self, id: str) -> None:
        """Forget it."""
        txn = self.txns.get(id)
        if self.ledger.is_committed(id) or (txn is not None and txn.state == "decided"):
            raise SinkError("COMMITTED", f"transaction {id} is committed, and cannot be aborted")
        if txn is not None:
            self.ledger.drop(txn)

    def uncommitted(self, flow: str, step: str, generation: int, store: str = "") -> list[Txn]:
        """Fence older generations of a job, and return what it has left over of them and of this one."""
        of = flow, step, store
        self.ledger.fence(of, generation)
        return [
            txn
            for txn in self.txns.values()
            if txn.of == of
            and not txn.alone
            and txn.generation <= generation
            and txn.state != "decided"
        ]

    # ------------------------------------------------------------ parts of it

    def _peers(self, txn: Txn) -> list[Txn]:
        """What is prepared of the same job, step and generation, in the order of votes."""
        if txn.alone:
            return []
        mine = (*txn.of, txn.generation)
        return [
            one
            for one in self.txns.values()
            if one.state == "prepared" and not one.alone and (*one.of, one.generation) == mine
            if one is not txn
        ]

    def _promised(self, txn: Txn, turn: int) -> tuple[dict[str, Staged], ...]:
        """What is applied before this one for certain, in this order; and what may be applied before it or after. (What
        is prepared alone may be neither: if its writer is gone it is never committed, and the same comes again.)"""
        waiting = [p for p in self.txns.values() if p.state == "decided" or not p.alone]
        first = [*self.ledger.queues.get(txn.of, ())]
        first += sorted((p for p in self._peers(txn) if p.turn < turn), key=lambda p: p.turn)
        known = {p.id for p in first}
        others = [
            p
            for p in waiting
            if p.state != "open" and p.id not in known and not _may_be_left_by(txn, p)
        ]
        return tuple(
            {p.id: p.log.records() for p in some if p.log is not None and not p.damaged}
            for some in (first, others)
        )

    def _check_fence(self, of: Step, generation: int, alone: bool) -> None:
        fence = self.ledger.fences.get(of, generation)
        if not alone and generation < fence:
            raise SinkError(
                "STALE", f"{job_of(of)}: generation {generation} is over, and {fence} has begun"
            )

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Whatever a target raises is an error of the target."""
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
    return bool(txn.store) and older.state == "prepared" and older.of == (txn.flow, txn.step, "")


def name_of(target: Target) -> str:
    """Which target it is, in words that are the same after a restart."""
    kind = type(target)
    return kind.__qualname__ if kind.__str__ is object.__str__ else str(target)


def shortened(text: str) -> str:
    """A text that fits into any answer.

    >>> shortened("short"), len(shortened("x" * 10_000_000))
    ('short', 2001)
    """
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "…"


def turn_of(snapshot: int, before: list[int]) -> int:
    """When it is the turn of what was prepared for this snapshot, after others that wait (rule 6).

    >>> in_words = lambda turn: (turn // GAP, turn % GAP)
    >>> in_words(turn_of(56, [])), in_words(turn_of(56, [56 * GAP])), in_words(turn_of(57, [56 * GAP]))
    ((56, 0), (56, 0), (57, 0))
    >>> in_words(turn_of(1, [56 * GAP])), in_words(turn_of(1, [56 * GAP, 56 * GAP + 1]))  # handed over after 56, twice
    ((56, 1), (56, 2))
    """
    last = max(before, default=0)
    return snapshot * GAP if snapshot >= last // GAP else last + 1
