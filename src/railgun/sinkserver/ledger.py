"""Keep on disk what a sink has promised about each transaction. No sockets, no target.

A directory holds a journal, `ledger`, and a log of each transaction that is not committed (`staged/<id>.log`).

Rules:

1. Every promise is in the journal before the answer is sent: a vote, a decision, the abort of a prepared transaction.
   The bytes of a transaction are in its log, synced before the vote. Data that a crash has torn was not promised; other
   damage is reported, and never taken for the end of a file (`journal.py`).
2. The note that a transaction was committed is written without a sync, since the target knows it, too. So the
   transaction's log is needed until the next synced entry has made the note safe: a power cut may keep the removal of
   the log and lose the earlier note. Without both, the transaction could not be told from a lost one.
3. Decided transactions wait in a queue of their flow, step and job. Trouble in one queue does not stop the others.
4. A committed transaction is remembered, so that a commit may be repeated: the last `KEPT_IDS` of each step.
5. The journal is rewritten when it has become long, whatever made it long.
6. The directory has a format file. A directory of a later version is refused, and nothing in it is changed.
7. A directory belongs to a target. It does not accept another target while transactions wait in it for the first.
8. A job is identified by its snapshot directory (`store`). Entries of an older Railgun have no identity. They are
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
KEPT_IDS: Final = 50_000
ABANDONED_AFTER_S: Final = 86_400.0
_REWRITE_LINES: Final = 20_000
"""Lines of the journal after which it is rewritten; more if it needs that many."""
ID: Final = re.compile(r"[0-9a-f]{32}")
_ENDING: Final = ".log"

State = Literal["open", "prepared", "decided"]
Step = tuple[str, str, str]  # flow, step, identity of the job's snapshot directory


@dataclass(slots=True)
class Txn:
    """A transaction that is not committed yet."""

    id: str
    flow: str
    step: str
    generation: int
    worker: int
    alone: bool
    log: Log | None
    store: str = ""
    """The identity of the job's snapshot directory; empty if an older Railgun began the transaction."""
    state: State = "open"
    snapshot: int = 0
    turn: int = 0
    end: int = 0
    count: int = 0
    doubt: bool = False
    """Whether the target may have the transaction already, though nothing on disk says so."""

    @property
    def origin(self) -> Step:
        """The flow, the step and the job of the transaction."""
        return self.flow, self.step, self.store

    @property
    def damaged(self) -> bool:
        """Whether data that was promised is missing."""
        return self.state != "open" and (self.log is None or self.log.end != self.end)

    def damage_error(self) -> LostError:
        """Return the error that reports a damaged transaction."""
        return LostError(
            "DAMAGED",
            f"the file of transaction {self.id} ({job_of(self.origin)}: {self.count:,} records for snapshot "
            f"{self.snapshot}) is gone or damaged; `railgun sink drop` gives it up",
        )

    def records(self) -> Records:
        """Return the records of the transaction; if it is damaged, reading them raises `LostError`."""
        return (
            Absent(self.damage_error()) if self.damaged or self.log is None else self.log.records()
        )


def job_of(origin: Step) -> str:
    """Return the flow, the step and the identity of the job as text.

    >>> job_of(("orders", "out", "5f3a")), job_of(("orders", "out", ""))
    ('orders, out, job 5f3a', 'orders, out')
    """
    flow, step, store = origin
    return f"{flow}, {step}, job {store}" if store else f"{flow}, {step}"


class Ledger:
    """The transactions in a directory. Not thread-safe: one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.txns: dict[str, Txn] = {}  # prepared ones in the order of their votes
        self.queues: dict[Step, list[Txn]] = {}  # decided transactions, in the order of decisions
        self.fences: dict[Step, int] = {}
        self.target = ""
        """The name of the target of committed transactions."""
        self.sink = ""
        """The unique id of this directory, which never changes."""
        self._committed: dict[Step, dict[str, None]] = {}
        self._removable: list[
            Log
        ] = []  # logs of committed transactions, needed until the next sync: rule 2
        self._staged = directory / "staged"
        self._max_lines = 0  # twice the lines that the journal needs
        self._journal = Journal(directory / "ledger")

    # ------------------------------------------------------------ start and end

    def open(self) -> list[str]:
        """Read the directory, or make it; return notes on damage."""
        notes: list[str] = []
        format_due = self._check_format()
        self._staged.mkdir(parents=True, exist_ok=True)
        sync_directory(self.directory.parent)
        sync_directory(self.directory)
        self._journal, entries = Journal.open(self._journal.path)
        try:
            if self._journal.cut:
                notes.append(f"{self._journal.cut:,} bytes at the end of the ledger were torn")
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
        return notes + [f"transaction {txn.id} was prepared, and is damaged" for txn in damaged]

    def close(self) -> None:
        """Close the journal, and remove logs that are not needed any more."""
        with contextlib.suppress(OSError):
            if self._removable:
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
            case {"prepared": str(id), **fields}:
                self.txns[id] = Txn(id, log=None, state="prepared", **fields)
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
                self.txns[id] = Txn(id, log=log, end=log.end, **log.header)

    def _entries(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of a journal that holds the current state."""
        yield {"sink": self.sink}
        yield {"target": self.target}
        for origin, generation in self.fences.items():
            yield _fence(origin, generation)
        for origin, committed in self._committed.items():
            ids = list(committed)
            for at in range(0, len(ids), 1000):
                yield {"committed": ids[at : at + 1000], "of": list(origin)}
        yield from (_prepared(txn) for txn in self.txns.values() if txn.state != "open")
        for queue in self.queues.values():
            yield {"decided": [txn.id for txn in queue]}

    # ------------------------------------------------------------ what happens to transactions

    def begin(self, id: str, **fields: Any) -> Txn:
        """Add a new, empty transaction with these fields, and return it."""
        path = self._staged / (id + _ENDING)
        txn = self.txns[id] = Txn(id, log=Log.create(path, fields), **fields)
        return txn

    def prepare(self, txn: Txn) -> None:
        """Sync the log of a transaction, and write the vote to the journal."""
        assert txn.log is not None
        txn.log.sync()
        sync_directory(self._staged)
        self._write(_prepared(txn))
        txn.state = "prepared"
        del self.txns[txn.id]
        self.txns[txn.id] = txn  # move it to the end: the last vote

    def decide(self, txns: list[Txn]) -> None:
        """Write the decision to commit these transactions, in this order."""
        self._write({"decided": [txn.id for txn in txns]})
        self._decide(txns)
        for txn in txns:
            txn.doubt = False  # the target was not called yet

    def _decide(self, txns: list[Txn]) -> None:
        for txn in txns:
            if txn.state == "prepared":
                txn.state, txn.doubt = "decided", True
                self.queues.setdefault(txn.origin, []).append(txn)

    def committed(self, txn: Txn, sync: bool) -> None:
        """Note that the target has a transaction; `sync` makes the note safe.

        The note counts even if it cannot be written: the journal is rewritten then.
        """
        self._remember(txn.origin, txn.id)
        if txn.log is not None:
            self._removable.append(txn.log)
        self._write({"committed": [txn.id], "of": list(txn.origin)}, sync=sync)

    def drop(self, txn: Txn) -> None:
        """Delete a transaction and its log."""
        if txn.state == "prepared":
            self._write({"aborted": txn.id})
        self.txns.pop(txn.id, None)
        with contextlib.suppress(OSError):
            if txn.log is not None:
                txn.log.remove()

    def give_up(self, txn: Txn) -> None:
        """Delete a transaction and let its flow take it for committed. Its records are lost."""
        if txn.state == "open":
            self.drop(txn)
        else:
            self.committed(txn, sync=True)

    def fence(self, origin: Step, generation: int) -> None:
        """Write down that a generation of a flow, step and job has begun."""
        if self.fences.get(origin) != generation:
            self._write(_fence(origin, generation))
            self.fences[origin] = generation

    def set_target(self, target: str) -> None:
        """Set the name of the target; raise `SinkError` if transactions wait for another one."""
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
        """Delete transactions that belong to no snapshot and whose writer has not come back for a day."""
        for txn in [txn for txn in self.txns.values() if txn.alone and txn.state != "decided"]:
            with contextlib.suppress(OSError):
                if (
                    txn.log is None
                    or time.time() - txn.log.path.stat().st_mtime > ABANDONED_AFTER_S
                ):
                    self.drop(txn)

    # ------------------------------------------------------------ internals

    @property
    def lines(self) -> int:
        """The number of lines of the journal."""
        return self._journal.lines

    def is_committed(self, id: str) -> bool:
        """Return whether a transaction is remembered as committed."""
        return any(id in ids for ids in self._committed.values())

    def _remember(self, origin: Step, id: str) -> None:
        ids = self._committed.setdefault(origin, {})
        ids[id] = None
        while len(ids) > KEPT_IDS:
            del ids[next(iter(ids))]
        txn = self.txns.pop(id, None)
        if txn is not None and txn in (queue := self.queues.get(origin, [])):
            queue.remove(txn)
            if not queue:
                del self.queues[origin]

    def _write(self, entry: dict[str, Any], sync: bool = True) -> None:
        """Append an entry to the journal. After a failed write, which may or may not be on disk, rewrite it first."""
        if self._journal.broken or self._journal.lines > max(_REWRITE_LINES, self._max_lines):
            self._rewrite()
        self._journal.add(entry, sync=sync)
        if sync:
            self._remove_logs()

    def _rewrite(self) -> None:
        self._journal.rewrite(self._entries())
        self._max_lines = 2 * self._journal.lines
        self._remove_logs()

    def _remove_logs(self) -> None:
        """Remove the logs of committed transactions, now that the notes of their commits are safe (rule 2)."""
        logs, self._removable = self._removable, []
        for log in logs:
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


def _fence(origin: Step, generation: int) -> dict[str, Any]:
    flow, step, store = origin
    return {"fence": [flow, step, generation, store]}
