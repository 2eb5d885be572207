"""The ledger: what a sink has promised of which transaction, on disk. Plain calls, no sockets, no target.

A directory holds a journal, `ledger`, and a log of each transaction that is not committed (`staged/<id>.log`).

Rules:

1. Everything that was promised is in the journal before the answer goes out: a vote, a decision, the abort of something
   prepared. The bytes of a transaction are in its log, synced before the vote. Whatever is torn after a crash was
   not promised; what is damaged otherwise is told, and never taken for an end (`journal.py`).
2. That a transaction was committed is noted without a sync, since the target knows it, too. So its log is needed until
   the next entry that is synced has made the note safe: a power cut may keep the removal of a file that came after the
   note, and lose the note. Without both nobody could tell it from one that is lost.
3. What is decided waits in a queue of its flow, step and job. Trouble with one does not stop others.
4. A committed transaction is remembered, so that a commit may come again. Of each step the last `KEPT` are.
5. The journal is written anew when it has become long, by whatever.
6. The directory has a format file. One of a later version is refused, and nothing is changed.
7. A directory belongs to a target. It does not take another one while something waits in it for the first.
8. A job is known by the identity of its snapshot directory (`store`). Entries of an older Railgun have none. They are
   loaded as they are, with an empty identity, which no job has.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from railgun.errors import LaterVersionError
from railgun.ingest.errors import LostError, SinkError
from railgun.sinks.staging import sync_directory
from railgun.sinkserver.journal import Journal
from railgun.sinkserver.staged import Absent, Log
from railgun.sinkserver.targets import Records
from railgun.storage.formats import FORMAT_FILE, Format, OtherFormatError, read_format_file

SINK_FORMAT: Final = Format("railgun sink", 2)
"""Of the directory of a sink. Since version 2 transactions have the identity of their job's snapshot directory."""
KEPT: Final = 50_000
DAY: Final = 86_400.0
_LINES: Final = 20_000  # until it is written anew; more if it has to be long
ID: Final = re.compile(r"[0-9a-f]{32}")
_ENDING: Final = ".log"

State = Literal["open", "prepared", "decided"]
Step = tuple[str, str, str]  # flow, step, identity of the job's snapshot directory


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
    store: str = ""
    """The identity of the job's snapshot directory; empty: it is of a Railgun that did not tell it."""
    state: State = "open"
    snapshot: int = 0
    turn: int = 0
    end: int = 0
    count: int = 0
    doubt: bool = False
    """Whether the target may have it already, though nothing says so."""

    @property
    def of(self) -> Step:
        """Whose it is."""
        return self.flow, self.step, self.store

    @property
    def damaged(self) -> bool:
        """Whether something was promised that is not here any more."""
        return self.state != "open" and (self.log is None or self.log.end != self.end)

    def damage(self) -> LostError:
        """What to say of one that is damaged."""
        return LostError(
            "DAMAGED",
            f"the file of transaction {self.id} ({job_of(self.of)}: {self.count:,} records for snapshot "
            f"{self.snapshot}) is gone or damaged; `railgun sink drop` gives it up",
        )

    def records(self) -> Records:
        """What it holds; if that is damaged, whoever reads it hears so."""
        return Absent(self.damage()) if self.damaged or self.log is None else self.log.records()


def job_of(of: Step) -> str:
    """Name a flow, a step and the identity of the job.

    >>> job_of(("orders", "out", "5f3a")), job_of(("orders", "out", ""))
    ('orders, out, job 5f3a', 'orders, out')
    """
    flow, step, store = of
    return f"{flow}, {step}, job {store}" if store else f"{flow}, {step}"


class Ledger:
    """All transactions in a directory. One thread at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.txns: dict[str, Txn] = {}  # in the order of their votes, as far as they are prepared
        self.queues: dict[Step, list[Txn]] = {}  # what is decided, in the order of decisions
        self.fences: dict[Step, int] = {}
        self.target = ""
        """Where committed ones go, in words."""
        self.sink = ""
        """What tells this directory from all others, for ever."""
        self._committed: dict[Step, dict[str, None]] = {}
        self._spent: list[Log] = []  # of committed ones: rule 2
        self._staged = directory / "staged"
        self._most = 0  # twice the lines it has to have
        self._journal = Journal(directory / "ledger")

    # ------------------------------------------------------------ start and end

    def open(self) -> list[str]:
        """Read what is there; what there is to tell of it."""
        told: list[str] = []
        format_due = self._check_format()
        self._staged.mkdir(parents=True, exist_ok=True)
        sync_directory(self.directory.parent)
        sync_directory(self.directory)
        self._journal, entries = Journal.open(self._journal.path)
        try:
            if self._journal.cut:
                told.append(f"{self._journal.cut:,} bytes at the end of the ledger were torn")
            for entry in entries:
                self._replay(entry)
            self._read_logs()
            if format_due:  # before entries that an older Railgun would not understand
                self._write_format()
            self.sink = self.sink or uuid.uuid4().hex
            self._rewrite()
            self.sweep()
        except BaseException:
            self._journal.close()
            raise
        damaged = [txn for txn in self.txns.values() if txn.damaged]
        return told + [f"transaction {txn.id} was prepared, and is damaged" for txn in damaged]

    def close(self) -> None:
        """Leave everything as it is, but for what is not needed."""
        with contextlib.suppress(OSError):
            if self._spent:
                self._rewrite()
        self._journal.close()

    def _check_format(self) -> bool:
        """Refuse a directory of a later version; return whether its format file has to be written."""
        try:
            return SINK_FORMAT.needs_writing(read_format_file(self.directory), str(self.directory))
        except (LaterVersionError, OtherFormatError) as error:
            raise SinkError(error.code, str(error)) from error

    def _write_format(self) -> None:
        new = self.directory / f"{FORMAT_FILE}.new"
        with new.open("wb") as file:
            file.write(SINK_FORMAT.dump())
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.directory / FORMAT_FILE)
        sync_directory(self.directory)

    def _replay(self, entry: dict[str, Any]) -> None:
        match entry:
            case {"prepared": str(id), **told}:
                self.txns[id] = Txn(id, log=None, state="prepared", **told)
            case {"decided": list(ids)}:
                self._decide([self.txns[id] for id in ids if id in self.txns])
            case {"committed": list(ids), "of": [flow, step, *store]}:
                for id in ids:
                    self._remember((flow, step, "".join(store)), id)
            case {"aborted": str(id)}:
                self.txns.pop(id, None)
            case {"fence": [flow, step, generation, *store]}:
                self.fences[flow, step, "".join(store)] = generation
            case {"target": str(target)}:
                self.target = target
            case {"sink": str(sink)}:
                self.sink = sink
            case _:
                raise SinkError(
                    "LATER_VERSION",
                    f"{self._journal.path} has an entry that this version of Railgun does not know: {entry}. Start the "
                    "sink with the version that wrote it, or a later one",
                )

    def _read_logs(self) -> None:
        for path in sorted(self._staged.iterdir()):
            id = path.name.removesuffix(_ENDING)
            txn = self.txns.get(id)
            log = Log.open(path) if path.name.endswith(_ENDING) and ID.fullmatch(id) else None
            if txn is not None:
                txn.log = log
            elif log is None or self.is_committed(id):
                path.unlink()
            else:
                self.txns[id] = Txn(id, log=log, end=log.end, **log.told)

    def _entries(self) -> Iterator[dict[str, Any]]:
        """What the journal has to say."""
        yield {"sink": self.sink}
        yield {"target": self.target}
        for of, generation in self.fences.items():
            yield _fence(of, generation)
        for of, ids in self._committed.items():
            known = list(ids)
            for at in range(0, len(known), 1000):
                yield {"committed": known[at : at + 1000], "of": list(of)}
        yield from (_prepared(txn) for txn in self.txns.values() if txn.state != "open")
        for queue in self.queues.values():
            yield {"decided": [txn.id for txn in queue]}

    # ------------------------------------------------------------ what happens to transactions

    def begin(self, id: str, **told: Any) -> Txn:
        """A new one, which is empty."""
        path = self._staged / (id + _ENDING)
        txn = self.txns[id] = Txn(id, log=Log.create(path, told), **told)
        return txn

    def prepare(self, txn: Txn) -> None:
        """Its numbers are known: make it safe, and write that down."""
        assert txn.log is not None
        txn.log.sync()
        sync_directory(self._staged)
        self._write(_prepared(txn))
        txn.state = "prepared"
        del self.txns[txn.id]
        self.txns[txn.id] = txn  # the last that has voted

    def decide(self, txns: list[Txn]) -> None:
        """They are to be committed, in this order."""
        self._write({"decided": [txn.id for txn in txns]})
        self._decide(txns)
        for txn in txns:
            txn.doubt = False  # nobody has asked the target yet

    def _decide(self, txns: list[Txn]) -> None:
        for txn in txns:
            if txn.state == "prepared":
                txn.state, txn.doubt = "decided", True
                self.queues.setdefault(txn.of, []).append(txn)

    def committed(self, txn: Txn, sync: bool) -> None:
        """The target has it. It counts from now on, also if that cannot be written: it is written anew then."""
        self._remember(txn.of, txn.id)
        if txn.log is not None:
            self._spent.append(txn.log)
        self._write({"committed": [txn.id], "of": list(txn.of)}, sync=sync)

    def drop(self, txn: Txn) -> None:
        """Forget it, as if it had never been."""
        if txn.state == "prepared":
            self._write({"aborted": txn.id})
        self.txns.pop(txn.id, None)
        with contextlib.suppress(OSError):
            if txn.log is not None:
                txn.log.remove()

    def give_up(self, txn: Txn) -> None:
        """Forget it, and tell whoever commits it that this is done. Its records are lost."""
        if txn.state == "open":
            self.drop(txn)
        else:
            self.committed(txn, sync=True)

    def fence(self, of: Step, generation: int) -> None:
        """A generation has begun."""
        if self.fences.get(of) != generation:
            self._write(_fence(of, generation))
            self.fences[of] = generation

    def belong_to(self, target: str) -> None:
        """Committed ones go there."""
        if target == self.target:
            return
        waiting = sum(txn.state != "open" for txn in self.txns.values())
        if waiting and self.target and target:
            raise SinkError(
                "OTHER_TARGET",
                f"{waiting} transactions wait in {self.directory} for {self.target}, and this sink fills {target}: "
                "take another directory, or let them be committed there first. If it is the same, and has another "
                "name now, say so by `railgun sink moved`",
            )
        self._write({"target": target})
        self.target = target

    def sweep(self) -> None:
        """Throw away what belongs to no snapshot, and whose writer has not come back for a day."""
        for txn in [one for one in self.txns.values() if one.alone and one.state != "decided"]:
            with contextlib.suppress(OSError):
                if txn.log is None or time.time() - txn.log.path.stat().st_mtime > DAY:
                    self.drop(txn)

    # ------------------------------------------------------------ inside

    @property
    def lines(self) -> int:
        """How long the journal is."""
        return self._journal.lines

    def is_committed(self, id: str) -> bool:
        """Whether it is remembered as committed."""
        return any(id in known for known in self._committed.values())

    def _remember(self, of: Step, id: str) -> None:
        known = self._committed.setdefault(of, {})
        known[id] = None
        while len(known) > KEPT:
            del known[next(iter(known))]
        txn = self.txns.pop(id, None)
        if txn is not None and txn in (queue := self.queues.get(of, [])):
            queue.remove(txn)
            if not queue:
                del self.queues[of]

    def _write(self, entry: dict[str, Any], sync: bool = True) -> None:
        """To the journal. What could not be written before may be there or not: all is written anew then."""
        if self._journal.broken or self._journal.lines > max(_LINES, self._most):
            self._rewrite()
        self._journal.add(entry, sync=sync)
        if sync:
            self._clear()

    def _rewrite(self) -> None:
        self._journal.rewrite(self._entries())
        self._most = 2 * self._journal.lines
        self._clear()

    def _clear(self) -> None:
        """All that was noted is safe: rule 2."""
        spent, self._spent = self._spent, []
        for log in spent:
            with contextlib.suppress(OSError):
                log.remove()


def _prepared(txn: Txn) -> dict[str, Any]:
    names = (
        "flow",
        "step",
        "store",
        "generation",
        "worker",
        "alone",
        "snapshot",
        "turn",
        "end",
        "count",
    )
    return {"prepared": txn.id, **{name: getattr(txn, name) for name in names}}


def _fence(of: Step, generation: int) -> dict[str, Any]:
    flow, step, store = of
    return {"fence": [flow, step, generation, store]}
