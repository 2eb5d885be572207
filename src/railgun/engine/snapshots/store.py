"""The store: all snapshots of a flow, in one directory.

Layout, below `<url>/<flow>/`::

    manifests/<id>.json                                         a committed snapshot; written last
    data/<id>/<stage>/<step>/worker-<n>-g<generation>.parquet   state, written for that snapshot
    attempts/<id>.json                                          what became of each attempt; for people
    run.json                                                    the highest generation and id that were given out, and
                                                                what tells this directory from others
    format                                                      which format the directory has (formats.py)
    lock                                                        who works here

Ids have twelve digits; what is not safe in a path is percent-encoded in the names of flows, stages and steps.

Rules:

1. Workers write parts, and nothing else. A part is never overwritten. A worker of an older generation that goes on
   writing does no harm: its files have names of their own, and no manifest names them.
2. Everything else is written by the one driver that holds the lock, and by no other: what it writes is refused if the
   lock is not held, or was lost.
3. Ids and generations are never given out twice. They are written down before they are used (`next_run`,
   `use_generation`, `begun`), and are above everything that any file shows.
4. A snapshot is committed when its manifest is there. Parts first, for good, then the manifest. Whoever loads one makes
   sure first that it is there for good.
5. A snapshot that is not whole is refused, never loaded in part, and never skipped without a word.
6. `clean` drops manifests first and parts after, so that no manifest ever names what is gone. It keeps what is loaded
   from, and what a snapshot under way may be writing. While it cannot know which parts a damaged manifest names, it
   keeps them all.
7. A directory or a manifest of a later version of Railgun is refused by name (`FormatError`), and nothing is changed.
   It is never taken for a damaged one, and no older snapshot is loaded in its place.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import quote

from railgun.engine.snapshots.errors import (
    DamagedError,
    DoesNotFitError,
    FormatError,
    SnapshotError,
    UndecidedError,
)
from railgun.engine.snapshots.manifest import (
    FORMAT,
    Manifest,
    Part,
    checksum,
    damaged,
    seal,
    unseal,
)
from railgun.errors import LaterVersionError
from railgun.storage.errors import DiskError, LockedError, MissingError, StorageError
from railgun.storage.formats import FORMAT_FILE, Format, OtherFormatError
from railgun.storage.lock import Lock
from railgun.storage.object_store import Disk, open_disk

STORE_FORMAT: Final = Format("railgun snapshots", 1)
"""Of the directory of a flow's snapshots."""
ATTEMPTS_KEPT: Final = 200
_ID: Final = re.compile(r"[0-9]{12,18}")
_FILE: Final = re.compile(r"[0-9]{12,18}\.json")
_LEAP: Final = 1000  # when run.json is lost: more than any generations that may have left no trace

State = Literal["committed", "failed", "aborted", "running"]


@dataclass(frozen=True, slots=True)
class Run:
    """The first generation and the first snapshot a driver may use."""

    generation: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of a snapshot that was begun; for people."""

    snapshot: int
    state: State
    full: bool
    why: str
    """Why it was taken."""
    began: float
    ended: float | None = None
    error: str | None = None
    """Why it failed."""
    size: int = 0
    """Bytes that were written for it."""
    rows: int = 0
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What `clean` has deleted."""

    manifests: int
    parts: int
    undecided: tuple[str, ...] = ()
    """Damaged manifests: because of them no part was deleted."""


class SnapshotStore:
    """The snapshots of a flow. `url`: a directory, a URL that pyarrow opens, or a `Disk`.

    >>> import tempfile
    >>> store = SnapshotStore(tempfile.mkdtemp(), "demo")
    >>> store.acquire(); store.next_run()
    Run(generation=1, snapshot=1)
    >>> store.begun(1, full=True, why="on demand")
    >>> part = store.write_part(1, 1, "count", "count by name", 0, b"rows", rows=1)
    >>> part.path
    'data/000000000001/count/count%20by%20name/worker-0-g1.parquet'
    >>> store.commit(Manifest(1, "demo", 1, 1, 1, True, False, 0.0, 1.0, (part,), (), ()))
    >>> store.latest().snapshot, store.read_part(part)
    (1, b'rows')
    """

    def __init__(self, url: str | Disk, flow: str) -> None:
        self.flow = flow
        self.disk: Disk = open_disk(url) if isinstance(url, str) else url
        self._home = encode_name(flow)
        self._lock: Lock | None = None
        self._pinned: Manifest | None = None
        self._running: dict[int, dict[str, Any]] = {}
        self._format_known = False

    def where(self, path: str = "") -> str:
        """The name of a file for people."""
        return self.disk.where(self._at(path))

    # ------------------------------------------------------------ workers

    def write_part(
        self,
        snapshot: int,
        generation: int,
        stage: str,
        step: str,
        worker: int,
        data: bytes,
        rows: int,
    ) -> Part:
        """Write the state of a step on a worker, for good."""
        directory = f"data/{_number(snapshot)}/{encode_name(stage)}/{encode_name(step)}"
        told = checksum(data)
        path = f"{directory}/worker-{worker}-g{generation}.parquet"
        if self.disk.exists(self._at(path)):
            # Never overwritten: a manifest may name it. Somebody else must have been this worker.
            path = f"{directory}/worker-{worker}-g{generation}-{told[-16:]}.parquet"
        self.disk.write(self._at(path), data)
        return Part(path, snapshot, stage, step, worker, rows, len(data), told)

    def read_part(self, part: Part) -> bytes:
        """A part, if it is what was written."""
        try:
            data = self.disk.read(self._at(part.path))
        except MissingError as error:
            raise DamagedError(
                f"{self.where(part.path)} is gone, which snapshot {part.snapshot} wrote for step {part.step!r}. "
                "Bring it back from a copy, or load an older snapshot."
            ) from error
        if len(data) != part.size:
            what = f"it has {len(data)} bytes, and {part.size} were written"
            raise damaged(self.where(part.path), what)
        if checksum(data) != part.checksum:
            raise damaged(self.where(part.path), "its checksum does not fit its content")
        return data

    # ------------------------------------------------------------ the driver: who, and which numbers

    def acquire(self) -> None:
        """Be the only job here; `LockedError` says who is."""
        if self._lock is not None:
            raise SnapshotError(f"{self.where()} is acquired already, by this very store")
        due = self._check_format()
        self._lock = self.disk.lock(self._at("lock"))
        if due:
            try:
                self.disk.write(self._at(FORMAT_FILE), STORE_FORMAT.dump())
            except DiskError:
                if STORE_FORMAT.version > 1:  # without the file a directory has version 1
                    self.release()
                    raise

    def _check_format(self) -> bool:
        """Refuse a directory of a later version; return whether its format file has to be written."""
        try:
            content = self.disk.read(self._at(FORMAT_FILE))
        except MissingError:
            content = None
        try:
            due = STORE_FORMAT.needs_writing(content, self.where())
        except LaterVersionError as error:
            raise FormatError(str(error)) from error
        except OtherFormatError as error:
            raise SnapshotError(str(error)) from error
        self._format_known = True
        return due

    def release(self) -> None:
        """Let others be it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def identity(self) -> str:
        """Return what tells this directory from others: made once, by the first run; empty: there was none.

        What a flow has staged in a sink is its own by that: another job of the same flow has another directory.
        """
        try:
            told = unseal("run", self.disk.read(self._at("run.json")), self.where("run.json"))
        except MissingError:
            return ""
        return str(told.get("identity", ""))

    def next_run(self) -> Run:
        """Numbers above all that were ever given out; written down before they are."""
        self._must_hold()
        generation, snapshot = self._counters()
        run = Run(generation + 1, snapshot + 1)
        self._write_counters(run.generation, snapshot)
        return run

    def use_generation(self, generation: int) -> None:
        """A generation is about to begin; to be called before its workers hear of it."""
        self._must_hold()
        known, snapshot = self._counters()
        if generation > known:
            self._write_counters(generation, snapshot)

    def _counters(self) -> tuple[int, int]:
        """The highest generation and snapshot that were ever given out."""
        generations, snapshots = [0], [0]
        snapshots += self._ids("attempts") + self._ids("manifests")
        for name in self.disk.list(self._at("data")):
            snapshots.append(_number_in(name) or 0)
            found = re.search(r"-g(\d+)", name.rpartition("/")[2])
            generations.append(int(found[1]) if found else 0)
        generations += [manifest.generation for manifest in self.manifests([])]
        generation, snapshot = max(generations), max(snapshots)
        name = self.where("run.json")
        try:
            told = unseal("run", self.disk.read(self._at("run.json")), name)
            return max(generation, int(told["generation"])), max(snapshot, int(told["snapshot"]))
        except MissingError:
            fresh = generation == snapshot == 0
            return (0, 0) if fresh else (generation + _LEAP, snapshot + _LEAP)
        except (DamagedError, KeyError, TypeError, ValueError) as error:
            raise DamagedError(
                f"{name} is damaged, which has the numbers of generations and snapshots. Delete it: the next ones "
                "will be well above all that the other files show."
            ) from error

    def _write_counters(self, generation: int, snapshot: int) -> None:
        content = {
            "format": FORMAT,
            "flow": self.flow,
            "generation": generation,
            "snapshot": snapshot,
            "identity": self.identity() or uuid.uuid4().hex,
        }
        self.disk.write(self._at("run.json"), seal("run", content))

    # ------------------------------------------------------------ the driver: taking snapshots

    def begun(self, snapshot: int, full: bool, why: str) -> None:
        """A snapshot is about to be taken; to be called before workers hear of it. Its id is used up."""
        self._must_hold()
        if self.disk.exists(self._at(_attempt_path(snapshot))) or self.has(snapshot):
            raise SnapshotError(
                f"snapshot {snapshot} of {self.flow!r} has been begun before; ids are used once"
            )
        told = {"format": FORMAT, "snapshot": snapshot, "state": "begun", "full": full, "why": why}
        told |= {"began": time.time()}
        self._write_attempt(told)
        self._running[snapshot] = told

    def commit(self, manifest: Manifest) -> None:
        """Make a snapshot count. When this returns it does, for good; if it raises, it does not.

        Only after `UndecidedError` nobody knows: then call `take_back` until it returns, and go back to no older
        snapshot before.
        """
        self._must_hold()
        if manifest.flow != self.flow:
            raise DoesNotFitError(
                f"snapshot {manifest.snapshot} is of flow {manifest.flow!r}, and this is the directory of {self.flow!r}"
            )
        newest = max(self._ids("manifests"), default=0)
        if manifest.snapshot <= newest:
            raise SnapshotError(
                f"snapshot {manifest.snapshot} of {self.flow!r} comes after {newest}, which is committed"
            )
        there = set(self.disk.list(self._at("data")))
        for part in manifest.parts:
            if part.path.removeprefix("data/") not in there:
                raise DamagedError(
                    f"snapshot {manifest.snapshot} cannot be committed: {self.where(part.path)} is gone"
                )
        path = self._at(_manifest_path(manifest.snapshot))
        try:
            self.disk.write(path, manifest.to_json())
        except Exception as error:
            self._take_back(manifest.snapshot, error)
            raise
        self._pinned = None
        told = self._running.pop(manifest.snapshot, None) or {
            "format": FORMAT,
            "snapshot": manifest.snapshot,
            "full": manifest.full,
            "why": "",
            "began": manifest.began,
        }
        with contextlib.suppress(DiskError):  # it is committed; the record is for people
            self._write_attempt(told | _ending(manifest))

    def take_back(self, snapshot: int) -> None:
        """Delete the manifest of a commit that raised `UndecidedError`, for good; raise it again if that fails."""
        self._must_hold()
        self._take_back(snapshot, None)

    def _take_back(self, snapshot: int, error: Exception | None) -> None:
        """Delete a manifest whose write raised `error` for good: some disks raise, and have it all the same.

        A manifest that comes back after a power cut would name output that a later generation has thrown away.
        """
        path = self._at(_manifest_path(snapshot))
        try:
            if error is not None and not self.disk.exists(path):
                return  # it never got its name
            self.disk.delete(path)
            self.disk.sync(self._at("manifests"))
        except DiskError as again:
            raise UndecidedError(
                f"snapshot {snapshot} of {self.flow!r} could not be committed ({error or again}), and its "
                f"manifest could not be taken back: {again}"
            ) from again

    def failed(self, snapshot: int, why: str) -> None:
        """A snapshot has not come about. If not even this can be written, it is kept in mind."""
        self._must_hold()
        if self.has(snapshot):
            raise SnapshotError(
                f"snapshot {snapshot} of {self.flow!r} is committed, and cannot fail"
            )
        told = self._running.pop(snapshot, None) or self._read_attempt(snapshot)
        told = told or {"format": FORMAT, "snapshot": snapshot, "full": False, "why": ""}
        told = {"began": time.time()} | told
        told |= {"state": "failed", "error": why, "ended": time.time()}
        try:
            self._write_attempt(told)
        except DiskError:
            self._running[snapshot] = told

    def attempts(self) -> list[Attempt]:
        """All attempts that are remembered, newest first."""
        committed = {manifest.snapshot: manifest for manifest in self.manifests([])}
        ids = set(self._ids("attempts"))
        ids |= committed.keys() | self._running.keys()
        busy = self._lock is not None or self.disk.holder(self._at("lock")) is not None
        newest = max(ids, default=0)
        found = []
        for snapshot in sorted(ids, reverse=True):
            told = self._running.get(snapshot) or self._read_attempt(snapshot) or {}
            if snapshot in committed:
                told = {"why": "", "began": committed[snapshot].began} | told
                told |= {"full": committed[snapshot].full} | _ending(committed[snapshot])
            state: State = "aborted"
            if told.get("state") in ("committed", "failed"):
                state = told["state"]
            elif snapshot in self._running or (busy and self._lock is None and snapshot == newest):
                state = "running"
            found.append(
                Attempt(
                    snapshot,
                    state,
                    bool(told.get("full")),
                    str(told.get("why", "")),
                    float(told.get("began", 0.0)),
                    told.get("ended"),
                    told.get("error"),
                    int(told.get("size", 0)),
                    int(told.get("rows", 0)),
                    dict(told.get("phases", {})),
                )
            )
        return found

    # ------------------------------------------------------------ loading

    def manifests(
        self, damaged: list[SnapshotError | StorageError] | None = None
    ) -> list[Manifest]:
        """All committed snapshots, newest first.

        One that cannot be read is an error; or, if a list `damaged` is given, its error goes there and the others come.
        One of a later version of Railgun is always an error (`FormatError`).
        """
        found = []
        for snapshot in self._ids("manifests"):
            try:
                found.append(self.get(snapshot))
            except MissingError:
                continue  # cleaned away since it was listed
            except FormatError:
                raise
            except (SnapshotError, StorageError) as error:
                if damaged is None:
                    raise
                damaged.append(error)
        return found

    def get(self, snapshot: int) -> Manifest:
        """A committed snapshot; `MissingError` if there is none of this id."""
        if not self._format_known:
            self._check_format()
        path = _manifest_path(snapshot)
        name = self.where(path)
        try:
            data = self.disk.read(self._at(path))
        except MissingError as error:
            there = ", ".join(map(str, reversed(self._ids("manifests"))))
            raise MissingError(
                f"{name} is not there: {self.flow!r} has no snapshot {snapshot}; it has {there or 'none'}."
            ) from error
        manifest = Manifest.from_json(data, name)
        if manifest.flow != self.flow:
            raise DoesNotFitError(
                f"{name} is of flow {manifest.flow!r}, and this is the directory of {self.flow!r}: snapshots cannot be "
                "given to another flow by copying them. Name the flow as it was."
            )
        if manifest.snapshot != snapshot:
            raise DamagedError(
                f"{name} is of snapshot {manifest.snapshot}: it has been renamed. Give it back its name, or delete it."
            )
        return manifest

    def committed_at(self, snapshot: int) -> float | None:
        """When a snapshot was committed, also one that has been cleaned away; None if nobody remembers."""
        try:
            return self.get(snapshot).committed
        except (SnapshotError, StorageError):
            told = self._read_attempt(snapshot) or {}
        ended = told.get("ended") if told.get("state") == "committed" else None
        return float(ended) if isinstance(ended, int | float) else None

    def check(self, manifest: Manifest, thorough: bool = True) -> None:
        """`DamagedError`, if a part is gone or damaged; if not `thorough`, only gone."""
        if thorough:
            for part in manifest.parts:
                self.read_part(part)
            return
        there = set(self.disk.list(self._at("data")))
        for part in manifest.parts:
            if part.path.removeprefix("data/") not in there:
                raise damaged(
                    self.where(part.path), f"it is gone, and {self._named(manifest)} names it"
                )

    def latest(self, allow_older: bool = False, thorough: bool = True) -> Manifest | None:
        """The newest committed snapshot; None if nothing was ever committed.

        If it is not whole: `DamagedError`; or, with `allow_older`, the next older one that is. `thorough` reads every
        part and compares its checksum, or else looks only whether it is there: workers compare it when they load.
        """
        self.disk.sync(self._at("manifests"))
        wrong: list[SnapshotError | StorageError] = []
        for snapshot in self._ids("manifests"):
            try:
                manifest = self.get(snapshot)
                self.check(manifest, thorough)
            except (DamagedError, MissingError) as error:
                wrong.append(error)
                if allow_older:
                    continue
                raise DamagedError(
                    f"the newest snapshot of {self.flow!r} is not whole: {error} What came after an older one would be "
                    "done again: say so if you want that."
                ) from error
            self.pin(manifest)
            return manifest
        if wrong:
            raise DamagedError(
                f"none of the snapshots of {self.flow!r} is whole: " + " ".join(map(str, wrong))
            ) from wrong[0]
        return None

    def pin(self, manifest: Manifest) -> None:
        """A flow is loaded from this one: `clean` keeps it until another is committed. `latest` does this itself."""
        self._pinned = manifest

    # ------------------------------------------------------------ retention

    def clean(self, keep: int = 3) -> Cleaned:
        """Keep the newest snapshots, and delete what only older ones need."""
        self._must_hold()
        if keep < 1:
            raise SnapshotError(f"at least one snapshot is kept, not {keep}")
        numbers = self._ids("manifests")
        kept: dict[int, Manifest] = {}
        unknown: list[int] = []
        for number in numbers:
            if len(kept) == keep:
                break
            try:
                kept[number] = self.get(number)
            except (SnapshotError, StorageError):
                unknown.append(number)
        if self._pinned is not None:
            kept.setdefault(self._pinned.snapshot, self._pinned)
        dropped = [number for number in numbers if number not in kept and number not in unknown]
        for number in dropped:
            self._remember(number)
            self.disk.delete(self._at(_manifest_path(number)))
        deleted = 0
        if dropped:  # for good: after a loss of power none is there again whose parts are gone
            self.disk.sync(self._at("manifests"))
        if numbers and not unknown:
            named = {part.path for manifest in kept.values() for part in manifest.parts}
            for name in self.disk.list(self._at("data")):
                belongs = _number_in(name)
                if f"data/{name}" not in named and belongs is not None and belongs <= numbers[0]:
                    self.disk.delete(self._at(f"data/{name}"))
                    deleted += 1
        for number in self._ids("attempts")[ATTEMPTS_KEPT:]:
            self.disk.delete(self._at(_attempt_path(number)))
        because = tuple(self.where(_manifest_path(number)) for number in unknown)
        return Cleaned(len(dropped), deleted, because)

    def _remember(self, snapshot: int) -> None:
        """See to it that the record of an attempt says how it ended, before its manifest goes."""
        told = self._read_attempt(snapshot)
        if told is None or told.get("state") != "begun":
            return
        with contextlib.suppress(SnapshotError, StorageError):
            self._write_attempt(told | _ending(self.get(snapshot)))

    # ------------------------------------------------------------ files

    def _at(self, path: str) -> str:
        return f"{self._home}/{path}" if path else self._home

    def _ids(self, directory: str) -> list[int]:
        """The snapshots that have a file there, newest first; what somebody else has put there is left alone."""
        names = self.disk.list(self._at(directory))
        return sorted((int(name[:-5]) for name in names if _FILE.fullmatch(name)), reverse=True)

    def _must_hold(self) -> None:
        if self._lock is None:
            raise SnapshotError(
                f"{self.where()} is not acquired; only who holds its lock may do this"
            )
        if not self._lock.held():
            raise LockedError(
                f"the lock {self.where('lock')} was lost: its file was deleted or replaced, perhaps by another job, "
                "which may work here now. This one must end."
            )

    def has(self, snapshot: int) -> bool:
        """Whether a snapshot of this number is committed."""
        return self.disk.exists(self._at(_manifest_path(snapshot)))

    def _named(self, manifest: Manifest) -> str:
        return self.where(_manifest_path(manifest.snapshot))

    def _write_attempt(self, told: dict[str, Any]) -> None:
        self.disk.write(self._at(_attempt_path(told["snapshot"])), seal("attempt", told))

    def _read_attempt(self, snapshot: int) -> dict[str, Any] | None:
        """None if there is none, or it is damaged: nothing depends on it."""
        path = _attempt_path(snapshot)
        try:
            return unseal("attempt", self.disk.read(self._at(path)), self.where(path))
        except (MissingError, DamagedError):
            return None


def encode_name(name: str) -> str:
    """A name of people's as one that is safe in a path, different for different names.

    >>> encode_name("count by/name"), encode_name(".."), encode_name("")
    ('count%20by%2Fname', '%2E%2E', '%')
    """
    encoded = quote(name, safe="", errors="surrogatepass")
    if len(encoded) > 150:  # file systems take 255
        encoded = f"{encoded[:100]}%{checksum(encoded.encode())[-32:]}"
    if encoded.startswith("."):
        encoded = encoded.replace(".", "%2E")
    return encoded or "%"


def _ending(manifest: Manifest) -> dict[str, Any]:
    written = [part for part in manifest.parts if part.snapshot == manifest.snapshot]
    return {
        "state": "committed",
        "ended": manifest.committed,
        "size": sum(part.size for part in written),
        "rows": sum(part.rows for part in written),
        "phases": manifest.phases,
    }


def _number(snapshot: int) -> str:
    return f"{snapshot:012d}"


def _number_in(name: str) -> int | None:
    """The id that a file of data belongs to; None for what somebody else has put there."""
    first = name.partition("/")[0]
    return int(first) if _ID.fullmatch(first) else None


def _manifest_path(snapshot: int) -> str:
    return f"manifests/{_number(snapshot)}.json"


def _attempt_path(snapshot: int) -> str:
    return f"attempts/{_number(snapshot)}.json"
