"""The participant: transactions of flows on disk, from their first byte to the target. Plain calls, no sockets.

A transaction goes through these states::

    open       its bytes come; nothing is promised
    prepared   the sink has voted yes: it is whole, safe, and the target can take it
    decided    it is to be committed, whatever happens
    committed  the target has it; its id is remembered
    (aborted)  as if it had never been

| | unknown | open | prepared | decided | committed |
|---|---|---|---|---|---|
| begin | → open | where it ends | where it ends | where it ends | where it ends |
| data | error | taken | dropped | dropped | dropped |
| prepare | no | yes → prepared, or no → unknown | yes, if it is the same | yes | yes |
| commit | error: lost | error: lost | → decided → committed | → committed | nothing to do |
| abort | nothing to do | → unknown | → unknown | error | error |

Rules:

1. Everything that was promised is in the ledger (a journal) before the answer goes out: a vote, a decision, the abort
   of something prepared. The bytes of a transaction are in a log of its own, synced before the vote. Whatever is torn
   after a crash was not promised.
2. `commit`: first the decision is written down, then the target applies it, then that it did. What was decided when a
   process died is applied by the next one, in the same order, before anything else is.
3. A committed transaction is remembered, so that a commit may come again, from any process. Of each step the last
   `KEPT` are: the tokens of one snapshot are far fewer, and a commit is repeated only as long as its token is in
   the latest snapshots. One that was forgotten is reported lost, never applied twice.
4. A commit of what is neither prepared nor remembered is an error: output is lost, and the flow must know.
5. `uncommitted` is asked for when a generation begins. All there is of it and of older ones is left over from processes
   that are gone, and its caller aborts it. (Of the same generation too: if the flow's snapshots were deleted, it
   counts its generations anew.) From then on nothing of an older generation is taken, so a process that is not quite
   dead learns it soon. A lower number than before is believed, for the same reason.
6. **Order.** A commit first commits what is prepared of the same flow, step and generation and was prepared for an
   *earlier snapshot*. So output comes in the order of snapshots, though workers publish on their own, at any time.

   Why that may be done: the numbers of tokens are those of snapshots. A token is committed after a manifest that holds
   it is safe (duty 1 in `flow/sink.py`), and that manifest is not older than the number. A snapshot gets a manifest, or
   fails, only after every worker has told all it has prepared; and what one has told is in every manifest from then on
   until it is committed (duty 2). So if somebody commits what was prepared for snapshot n, all that was prepared for
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
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from railgun.connector.errors import LostError, MisuseError, SinkError
from railgun.connector.sinks.journal import Journal
from railgun.connector.sinks.staged import Log, Staged
from railgun.connector.sinks.targets import REMEMBERED, Target, TargetError
from railgun.connectors.staging import sync_directory
from railgun.core.errors import RailgunError

KEPT: Final = 50_000
REFUSED: Final = 1000
GAP: Final = 1 << 20  # turns between two snapshots
DAY: Final = 86_400.0
_LONGEST_NAME: Final = 1000
_LINES: Final = 20_000  # of a ledger, until it is written anew; more if it has to be long
_ID: Final = re.compile(r"[0-9a-f]{32}")
_ENDING: Final = ".log"

State = Literal["open", "prepared", "decided"]
Step = tuple[str, str]  # flow, step


@dataclass(slots=True)
class Txn:
    """A transaction that is not committed."""

    id: str
    flow: str
    step: str
    generation: int
    worker: int
    alone: bool
    log: Log | None
    state: State = "open"
    snapshot: int = 0
    turn: int = 0
    end: int = 0
    count: int = 0

    @property
    def of(self) -> Step:
        """Whose it is."""
        return self.flow, self.step


class Participant:
    """All transactions in a directory. One thread at a time."""

    def __init__(self, directory: Path, target: Target) -> None:
        self.directory = directory
        self.target = target
        self.txns: dict[str, Txn] = {}  # in the order of their votes, as far as they are prepared
        self.records = 0
        """Records that were committed since the start."""
        self.commits = 0
        self._applied = 0
        self._decided: list[Txn] = []
        self._committed: dict[Step, dict[str, None]] = {}
        self._fences: dict[Step, int] = {}
        self._refused: dict[str, RailgunError] = {}  # the last ones that got a no, and why
        self._staged = directory / "staged"
        self._ledger: Journal

    # ------------------------------------------------------------ start and end

    def open(self) -> list[str]:
        """Read what is there; what there is to tell of it."""
        told: list[str] = []
        self._staged.mkdir(parents=True, exist_ok=True)
        sync_directory(self.directory.parent)
        sync_directory(self.directory)
        self._ledger, entries = Journal.open(self.directory / "ledger")
        if self._ledger.cut:
            told.append(f"{self._ledger.cut:,} bytes at the end of the ledger were torn")
        for entry in entries:
            self._replay(entry)
        told += self._read_logs()
        self._ledger.rewrite(self._entries())
        self.target.sink = self._id()
        self.target.open()
        if self._decided:
            told.append(f"{len(self._decided)} transactions were decided on, and are applied now")
            try:
                self.finish()
            except RailgunError as error:
                told.append(f"they wait: {error}")
        return told

    def _id(self) -> str:
        """What tells this sink from all others, made at the first start."""
        journal, entries = Journal.open(self.directory / "id")
        if not entries:
            entries = [uuid.uuid4().hex]
            journal.add(*entries)
        journal.close()
        return str(entries[0])

    def close(self) -> None:
        """Leave everything as it is."""
        self._ledger.close()
        self.target.close()

    def _replay(self, entry: dict[str, Any]) -> None:
        match entry:
            case {"prepared": str(id), **told}:
                self.txns[id] = Txn(id, log=None, state="prepared", **told)
            case {"decided": list(ids)}:
                for id in ids:
                    if id in self.txns and self.txns[id].state == "prepared":
                        self.txns[id].state = "decided"
                        self._decided.append(self.txns[id])
            case {"committed": list(ids), "of": [flow, step]}:
                for id in ids:
                    self._remember((flow, step), id)
                    txn = self.txns.pop(id, None)
                    if txn is not None and txn in self._decided:
                        self._decided.remove(txn)
            case {"aborted": str(id)}:
                self.txns.pop(id, None)
            case {"fence": [flow, step, generation]}:
                self._fences[flow, step] = generation
            case _:
                raise SinkError(
                    "DAMAGED", f"{self._ledger.path} has an entry that makes no sense: {entry}"
                )

    def _read_logs(self) -> list[str]:
        told = []
        for path in sorted(self._staged.iterdir()):
            id = path.name.removesuffix(_ENDING)
            txn = self.txns.get(id)
            age = time.time() - path.stat().st_mtime
            log = Log.open(path) if path.name.endswith(_ENDING) and _ID.fullmatch(id) else None
            gone = self._is_committed(id) or (log is None and txn is None)
            if log is not None and txn is None and not gone:
                made = Txn(id, log=log, end=log.end, **log.told)
                if not (made.alone and age > DAY):
                    self.txns[id] = made
                    continue
                gone = True
            if gone:
                path.unlink()
            elif txn is not None:
                txn.log = log
                if txn.alone and txn.state == "prepared" and age > DAY:
                    self._drop(txn)
        for txn in self.txns.values():
            if txn.state != "open" and (txn.log is None or txn.log.end != txn.end):
                told.append(f"transaction {txn.id} was prepared, and is damaged")
        return told

    def _entries(self) -> Iterator[dict[str, Any]]:
        """What the ledger has to say."""
        for (flow, step), generation in self._fences.items():
            yield {"fence": [flow, step, generation]}
        for (flow, step), ids in self._committed.items():
            known = list(ids)
            for at in range(0, len(known), 1000):
                yield {"committed": known[at : at + 1000], "of": [flow, step]}
        yield from (_prepared(txn) for txn in self.txns.values() if txn.state != "open")
        if self._decided:
            yield {"decided": [txn.id for txn in self._decided]}

    # ------------------------------------------------------------ bytes

    def begin(
        self, id: str, flow: str, step: str, generation: int, worker: int, alone: bool = False
    ) -> int:
        """A transaction begins, or goes on; how many bytes of it are here."""
        if not _ID.fullmatch(id) or max(len(flow), len(step)) > _LONGEST_NAME:
            raise MisuseError("BAD_TXN", f"{id[:40]!r} of {flow[:40]!r} is no transaction")
        txn = self.txns.get(id)
        if txn is not None:
            if (txn.flow, txn.step, txn.generation) != (flow, step, generation):
                raise MisuseError("BAD_TXN", f"transaction {id} is of {txn.flow}, {txn.step}")
            return txn.end
        if self._is_committed(id):
            return 0
        self._check_refused(id)
        self._check_fence(flow, step, generation, alone)
        told: dict[str, Any] = {"flow": flow, "step": step, "generation": generation}
        told |= {"worker": worker, "alone": alone}
        self.txns[id] = Txn(id, log=Log.create(self._staged / (id + _ENDING), told), **told)
        return 0

    def data(self, id: str, start: int, data: bytes | bytearray) -> int:
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
        if txn is None and self._is_committed(id):
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
            self._drop(txn)
            if isinstance(error, RailgunError):
                self._refused[id] = error
                if len(self._refused) > REFUSED:
                    del self._refused[next(iter(self._refused))]
            raise

    def _check_refused(self, id: str) -> None:
        """Whoever has not heard of a no hears it now."""
        refused = self._refused.get(id)
        if refused is not None:
            raise SinkError(str(getattr(refused, "code", "FAILED")), str(refused)) from refused

    def _prepare(self, txn: Txn, snapshot: int, end: int, count: int) -> None:
        self._check_fence(txn.flow, txn.step, txn.generation, txn.alone)
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
        txn.log.sync()
        sync_directory(self._staged)
        txn.snapshot, txn.count, txn.turn = snapshot, count, turn
        self._write(_prepared(txn))
        txn.state = "prepared"
        del self.txns[txn.id]
        self.txns[txn.id] = txn  # the last that has voted

    def commit(self, id: str) -> None:
        """Give it to the target, and before it what must come first."""
        txn = self.txns.get(id)
        if txn is None and self._is_committed(id):
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
                if one.log is None or one.log.end != one.end:
                    raise LostError(
                        "DAMAGED", f"transaction {one.id} was prepared, and its file is damaged"
                    )
            self._write({"decided": [one.id for one in chosen]})
            for one in chosen:
                one.state = "decided"
            self._decided += chosen
        self.finish()

    def finish(self) -> None:
        """Let the target apply what is decided."""
        while self._decided:
            txn = self._decided[0]
            if txn.log is None:
                raise LostError("DAMAGED", f"the file of transaction {txn.id} is gone")
            with self._asked():
                self.target.apply(txn.id, txn.log.records())
            # The next entry that is synced makes this one safe; until then the target remembers.
            self._applied += 1
            sync = self._applied % (REMEMBERED // 2) == 0
            self._write({"committed": [txn.id], "of": list(txn.of)}, sync=sync)
            self._decided.pop(0)
            del self.txns[txn.id]
            self._remember(txn.of, txn.id)
            self.records += txn.count
            self.commits += 1
            with contextlib.suppress(OSError):
                txn.log.remove()
            if self._ledger.lines > max(_LINES, 2 * len(self.txns)):
                self._ledger.rewrite(self._entries())

    def abort(self, id: str) -> None:
        """Forget it."""
        txn = self.txns.get(id)
        if self._is_committed(id) or (txn is not None and txn.state == "decided"):
            raise SinkError("COMMITTED", f"transaction {id} is committed, and cannot be aborted")
        if txn is not None:
            self._drop(txn)

    def uncommitted(self, flow: str, step: str, generation: int) -> list[Txn]:
        """A generation begins: what is left over; and nothing of older ones is taken from now on."""
        if self._fences.get((flow, step)) != generation:
            self._write({"fence": [flow, step, generation]})
            self._fences[flow, step] = generation
        return [
            txn
            for txn in self.txns.values()
            if txn.of == (flow, step)
            and not txn.alone
            and txn.generation <= generation
            and txn.state != "decided"
        ]

    # ------------------------------------------------------------ parts of it

    def _peers(self, txn: Txn) -> list[Txn]:
        """What is prepared of the same flow, step and generation, in the order of votes."""
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
        first = [p for p in waiting if p.of == txn.of and p.state == "decided"]
        first += sorted((p for p in self._peers(txn) if p.turn < turn), key=lambda p: p.turn)
        known = {p.id for p in first}
        others = [p for p in waiting if p.state != "open" and p.id not in known]
        return tuple(
            {p.id: p.log.records() for p in some if p.log is not None} for some in (first, others)
        )

    def _check_fence(self, flow: str, step: str, generation: int, alone: bool) -> None:
        fence = self._fences.get((flow, step), generation)
        if not alone and generation < fence:
            raise SinkError(
                "STALE", f"{flow}, {step}: generation {generation} is over, and {fence} has begun"
            )

    def _drop(self, txn: Txn) -> None:
        if txn.state == "prepared":
            self._write({"aborted": txn.id})
        self.txns.pop(txn.id, None)
        with contextlib.suppress(OSError):
            if txn.log is not None:
                txn.log.remove()

    def _is_committed(self, id: str) -> bool:
        return any(id in known for known in self._committed.values())

    def _remember(self, of: Step, id: str) -> None:
        known = self._committed.setdefault(of, {})
        known[id] = None
        while len(known) > KEPT:
            del known[next(iter(known))]

    def _write(self, entry: dict[str, Any], sync: bool = True) -> None:
        """To the ledger, for good. What could not be written before may be there or not: all is written anew then."""
        if self._ledger.broken:
            self._ledger.rewrite(self._entries())
        self._ledger.add(entry, sync=sync)

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


def _prepared(txn: Txn) -> dict[str, Any]:
    names = ("flow", "step", "generation", "worker", "alone", "snapshot", "turn", "end", "count")
    return {"prepared": txn.id, **{name: getattr(txn, name) for name in names}}


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
