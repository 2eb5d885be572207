"""Store all snapshots of a flow in one directory.

Layout, below `<url>/<flow>/`::

    manifests/<id>.json                                         a committed snapshot; written last
    data/<id>/<stage>/<step>/worker-<n>-g<generation>.parquet   state, written for that snapshot
    attempts/<id>.json                                          how each attempt ended; for people
    run.json                                                    the highest generation and id given out so far, and the
                                                                identity of this directory
    format                                                      the format of the directory (formats.py)
    lock                                                        the job that works here

Ids have twelve digits. In the names of flows, stages and steps, characters that are not safe in a path are
percent-encoded.

Rules:

1. Workers write parts, and nothing else. A part is never overwritten. A worker of an older generation that goes on
   writing does no harm: its files have their own names, and no manifest lists them.
2. Everything else is written only by the driver that holds the lock: its writes are refused if it does not hold the
   lock, or has lost it.
3. Ids and generations are never given out twice. They are written down before they are used (`next_run`,
   `use_generation`, `begun`), and are higher than those in any file.
4. A snapshot is committed when its manifest exists. The parts are made durable first, then the manifest is written.
   Before a manifest is loaded, its directory entry is made durable.
5. A snapshot with a missing or damaged file is refused: it is never loaded in part, and never skipped silently.
6. `clean` deletes manifests first and parts after, so that no manifest ever lists a deleted part. It keeps the snapshot
   that was loaded, and files that a snapshot under way may be writing. While a damaged manifest hides which parts it
   lists, `clean` keeps all parts.
7. A directory or a manifest of a later version of Railgun is refused by name (`FormatError`), and nothing is changed.
   It is never treated as damaged, and no older snapshot is loaded in its place.
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
"""Format of the directory of a flow's snapshots."""
ATTEMPTS_KEPT: Final = 200
_ID: Final = re.compile(r"[0-9]{12,18}")
_FILE: Final = re.compile(r"[0-9]{12,18}\.json")
# Added if run.json is lost: more numbers than may have been used without a trace.
_LEAP: Final = 1000

State = Literal["committed", "failed", "aborted", "running"]


@dataclass(frozen=True, slots=True)
class Run:
    """The first generation and the first snapshot that a driver may use."""

    generation: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of an attempt to take a snapshot, for people."""

    snapshot: int
    state: State
    full: bool
    why: str
    """Why the snapshot was taken."""
    began: float
    ended: float | None = None
    error: str | None = None
    """Why it failed."""
    size: int = 0
    """Bytes written for the snapshot."""
    rows: int = 0
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The result of `clean`: numbers of deleted files."""

    manifests: int
    parts: int
    undecided: tuple[str, ...] = ()
    """Damaged manifests. If there are any, no part was deleted."""


class SnapshotStore:
    """The snapshots of one flow. `url`: a directory, a URL that pyarrow opens, or a `Disk`.

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
        """Return the location of a file, for messages."""
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
        """Write the state of a step on a worker durably, and return its entry for the manifest."""
        directory = f"data/{_number(snapshot)}/{encode_name(stage)}/{encode_name(step)}"
        digest = checksum(data)
        path = f"{directory}/worker-{worker}-g{generation}.parquet"
        if self.disk.exists(self._at(path)):
            # A manifest may list this file, so it is not overwritten. Another process must have been this worker.
            path = f"{directory}/worker-{worker}-g{generation}-{digest[-16:]}.parquet"
        self.disk.write(self._at(path), data)
        return Part(path, snapshot, stage, step, worker, rows, len(data), digest)

    def read_part(self, part: Part) -> bytes:
        """Return the content of a part. Raises `DamagedError` if it is not what was written."""
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

    # ------------------------------------------------------------ the driver: lock and numbers

    def acquire(self) -> None:
        """Lock the directory for this job. Raises `LockedError`, which names the job that holds the lock."""
        if self._lock is not None:
            raise SnapshotError(f"{self.where()} is acquired already, by this very store")
        due = self._check_format()
        self._lock = self.disk.lock(self._at("lock"))
        if due:
            try:
                self.disk.write(self._at(FORMAT_FILE), STORE_FORMAT.dump())
            except DiskError:
                if STORE_FORMAT.version > 1:  # a directory without the file has version 1
                    self.release()
                    raise

    def _check_format(self) -> bool:
        """Refuse a directory of a later version. Return whether its format file has to be written."""
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
        """Release the directory's lock, so that another job can acquire it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def identity(self) -> str:
        """Return the random identity of this directory, which the first run made; empty before that.

        It marks the output that a flow has staged in a sink as its own: another job of the same flow has another
        directory.
        """
        try:
            run = unseal("run", self.disk.read(self._at("run.json")), self.where("run.json"))
        except MissingError:
            return ""
        return str(run.get("identity", ""))

    def next_run(self) -> Run:
        """Return numbers above all that were ever given out, after writing them down."""
        self._must_hold()
        generation, snapshot = self._counters()
        run = Run(generation + 1, snapshot + 1)
        self._write_counters(run.generation, snapshot)
        return run

    def use_generation(self, generation: int) -> None:
        """Record durably that a generation is about to begin. Call this before its workers hear of it."""
        self._must_hold()
        last_generation, snapshot = self._counters()
        if generation > last_generation:
            self._write_counters(generation, snapshot)

    def _counters(self) -> tuple[int, int]:
        """Return the highest generation and snapshot that were ever given out. Raises `DamagedError`."""
        generations, snapshots = [0], [0]
        snapshots += self._ids("attempts") + self._ids("manifests")
        for name in self.disk.list(self._at("data")):
            snapshots.append(_number_in(name) or 0)
            match = re.search(r"-g(\d+)", name.rpartition("/")[2])
            generations.append(int(match[1]) if match else 0)
        generations += [manifest.generation for manifest in self.manifests([])]
        generation, snapshot = max(generations), max(snapshots)
        name = self.where("run.json")
        try:
            run = unseal("run", self.disk.read(self._at("run.json")), name)
            return max(generation, int(run["generation"])), max(snapshot, int(run["snapshot"]))
        except MissingError:
            fresh = generation == snapshot == 0
            return (0, 0) if fresh else (generation + _LEAP, snapshot + _LEAP)
        except (DamagedError, KeyError, TypeError, ValueError) as error:
            raise DamagedError(
                f"{name} is damaged, which has the numbers of generations and snapshots. Delete it: the next ones "
                "will be well above all that the other files show."
            ) from error

    def _write_counters(self, generation: int, snapshot: int) -> None:
        counters = {
            "format": FORMAT,
            "flow": self.flow,
            "generation": generation,
            "snapshot": snapshot,
            "identity": self.identity() or uuid.uuid4().hex,
        }
        self.disk.write(self._at("run.json"), seal("run", counters))

    # ------------------------------------------------------------ the driver: taking snapshots

    def begun(self, snapshot: int, full: bool, why: str) -> None:
        """Record that a snapshot is about to be taken. Call this before workers hear of it; it uses up the id."""
        self._must_hold()
        if self.disk.exists(self._at(_attempt_path(snapshot))) or self.has(snapshot):
            raise SnapshotError(
                f"snapshot {snapshot} of {self.flow!r} has been begun before; ids are used once"
            )
        attempt = {
            "format": FORMAT,
            "snapshot": snapshot,
            "state": "begun",
            "full": full,
            "why": why,
        }
        attempt |= {"began": time.time()}
        self._write_attempt(attempt)
        self._running[snapshot] = attempt

    def commit(self, manifest: Manifest) -> None:
        """Commit a snapshot by writing its manifest. When this returns, the commit is durable; if it raises, there is
        none.

        Only `UndecidedError` leaves open whether the manifest exists: then call `take_back` until it returns, and load
        no older snapshot before.
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
        data_files = set(self.disk.list(self._at("data")))
        for part in manifest.parts:
            if part.path.removeprefix("data/") not in data_files:
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
        attempt = self._running.pop(manifest.snapshot, None) or {
            "format": FORMAT,
            "snapshot": manifest.snapshot,
            "full": manifest.full,
            "why": "",
            "began": manifest.began,
        }
        with contextlib.suppress(DiskError):
            # The snapshot is committed; the attempt is only for people.
            self._write_attempt(attempt | _ending(manifest))

    def take_back(self, snapshot: int) -> None:
        """Delete the manifest of a commit that raised `UndecidedError`, durably. Raises it again if that fails."""
        self._must_hold()
        self._take_back(snapshot, None)

    def _take_back(self, snapshot: int, error: Exception | None) -> None:
        """Delete a manifest whose write raised `error`, durably: some disks raise although the file was written.

        A manifest that reappears after a power cut would list output that a later generation has discarded.
        """
        path = self._at(_manifest_path(snapshot))
        try:
            if error is not None and not self.disk.exists(path):
                return  # the file was never renamed to its final name
            self.disk.delete(path)
            self.disk.sync(self._at("manifests"))
        except DiskError as delete_error:
            raise UndecidedError(
                f"snapshot {snapshot} of {self.flow!r} could not be committed ({error or delete_error}), and its "
                f"manifest could not be taken back: {delete_error}"
            ) from delete_error

    def failed(self, snapshot: int, why: str) -> None:
        """Record that a snapshot has failed. If even this cannot be written, it is kept in memory."""
        self._must_hold()
        if self.has(snapshot):
            raise SnapshotError(
                f"snapshot {snapshot} of {self.flow!r} is committed, and cannot fail"
            )
        attempt = self._running.pop(snapshot, None) or self._read_attempt(snapshot)
        attempt = attempt or {"format": FORMAT, "snapshot": snapshot, "full": False, "why": ""}
        attempt = {"began": time.time()} | attempt
        attempt |= {"state": "failed", "error": why, "ended": time.time()}
        try:
            self._write_attempt(attempt)
        except DiskError:
            self._running[snapshot] = attempt

    def attempts(self) -> list[Attempt]:
        """Return all recorded attempts, newest first."""
        committed = {manifest.snapshot: manifest for manifest in self.manifests([])}
        ids = set(self._ids("attempts"))
        ids |= committed.keys() | self._running.keys()
        locked = self._lock is not None or self.disk.holder(self._at("lock")) is not None
        newest = max(ids, default=0)
        attempts = []
        for snapshot in sorted(ids, reverse=True):
            attempt = self._running.get(snapshot) or self._read_attempt(snapshot) or {}
            if snapshot in committed:
                attempt = {"why": "", "began": committed[snapshot].began} | attempt
                attempt |= {"full": committed[snapshot].full} | _ending(committed[snapshot])
            state: State = "aborted"
            if attempt.get("state") in ("committed", "failed"):
                state = attempt["state"]
            elif snapshot in self._running or (
                locked and self._lock is None and snapshot == newest
            ):
                state = "running"
            attempts.append(
                Attempt(
                    snapshot,
                    state,
                    bool(attempt.get("full")),
                    str(attempt.get("why", "")),
                    float(attempt.get("began", 0.0)),
                    attempt.get("ended"),
                    attempt.get("error"),
                    int(attempt.get("size", 0)),
                    int(attempt.get("rows", 0)),
                    dict(attempt.get("phases", {})),
                )
            )
        return attempts

    # ------------------------------------------------------------ loading

    def manifests(
        self, damaged: list[SnapshotError | StorageError] | None = None
    ) -> list[Manifest]:
        """Return the manifests of all committed snapshots, newest first.

        Raises the error of a manifest that cannot be read. If a list `damaged` is given, such errors are appended to it
        instead, and the other manifests are returned. A manifest of a later version of Railgun always raises
        `FormatError`.
        """
        manifests = []
        for snapshot in self._ids("manifests"):
            try:
                manifests.append(self.get(snapshot))
            except MissingError:
                continue  # `clean` has deleted it since it was listed
            except FormatError:
                raise
            except (SnapshotError, StorageError) as error:
                if damaged is None:
                    raise
                damaged.append(error)
        return manifests

    def get(self, snapshot: int) -> Manifest:
        """Return the manifest of a committed snapshot. Raises `MissingError` if there is no such snapshot."""
        if not self._format_known:
            self._check_format()
        path = _manifest_path(snapshot)
        name = self.where(path)
        try:
            data = self.disk.read(self._at(path))
        except MissingError as error:
            numbers = ", ".join(map(str, reversed(self._ids("manifests"))))
            raise MissingError(
                f"{name} is not there: {self.flow!r} has no snapshot {snapshot}; it has {numbers or 'none'}."
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
        """Return when a snapshot was committed, also one that `clean` has deleted; None if there is no record of it."""
        try:
            return self.get(snapshot).committed
        except (SnapshotError, StorageError):
            attempt = self._read_attempt(snapshot) or {}
        ended = attempt.get("ended") if attempt.get("state") == "committed" else None
        return float(ended) if isinstance(ended, int | float) else None

    def check(self, manifest: Manifest, thorough: bool = True) -> None:
        """Raise `DamagedError` if a part of a snapshot is missing or damaged.

        `thorough`: read every part and compare its checksum; otherwise only check that the files exist.
        """
        if thorough:
            for part in manifest.parts:
                self.read_part(part)
            return
        data_files = set(self.disk.list(self._at("data")))
        for part in manifest.parts:
            if part.path.removeprefix("data/") not in data_files:
                raise damaged(
                    self.where(part.path), f"it is gone, and {self._named(manifest)} names it"
                )

    def latest(self, allow_older: bool = False, thorough: bool = True) -> Manifest | None:
        """Return the newest committed snapshot, or None if there is none, and pin it (`pin`).

        If it is damaged, raise `DamagedError`, or with `allow_older` return the next older undamaged one. `thorough`:
        compare the checksum of every part; otherwise only check that the files exist, because workers compare checksums
        when they load them.
        """
        self.disk.sync(self._at("manifests"))
        errors: list[SnapshotError | StorageError] = []
        for snapshot in self._ids("manifests"):
            try:
                manifest = self.get(snapshot)
                self.check(manifest, thorough)
            except (DamagedError, MissingError) as error:
                errors.append(error)
                if allow_older:
                    continue
                raise DamagedError(
                    f"the newest snapshot of {self.flow!r} is not whole: {error} What came after an older one would be "
                    "done again: say so if you want that."
                ) from error
            self.pin(manifest)
            return manifest
        if errors:
            raise DamagedError(
                f"none of the snapshots of {self.flow!r} is whole: " + " ".join(map(str, errors))
            ) from errors[0]
        return None

    def pin(self, manifest: Manifest) -> None:
        """Let `clean` keep this snapshot, which a flow is loaded from, until another is committed."""
        self._pinned = manifest

    # ------------------------------------------------------------ retention

    def clean(self, keep: int = 3) -> Cleaned:
        """Keep the newest `keep` snapshots, and delete older ones with the parts that only they list."""
        self._must_hold()
        if keep < 1:
            raise SnapshotError(f"at least one snapshot is kept, not {keep}")
        numbers = self._ids("manifests")
        kept: dict[int, Manifest] = {}
        unreadable: list[int] = []
        for number in numbers:
            if len(kept) == keep:
                break
            try:
                kept[number] = self.get(number)
            except (SnapshotError, StorageError):
                unreadable.append(number)
        if self._pinned is not None:
            kept.setdefault(self._pinned.snapshot, self._pinned)
        dropped = [number for number in numbers if number not in kept and number not in unreadable]
        for number in dropped:
            self._remember(number)
            self.disk.delete(self._at(_manifest_path(number)))
        deleted = 0
        if dropped:
            # Durably, so that after a power cut no manifest reappears whose parts are deleted.
            self.disk.sync(self._at("manifests"))
        if numbers and not unreadable:
            listed = {part.path for manifest in kept.values() for part in manifest.parts}
            for name in self.disk.list(self._at("data")):
                owner = _number_in(name)
                if f"data/{name}" not in listed and owner is not None and owner <= numbers[0]:
                    self.disk.delete(self._at(f"data/{name}"))
                    deleted += 1
        for number in self._ids("attempts")[ATTEMPTS_KEPT:]:
            self.disk.delete(self._at(_attempt_path(number)))
        undecided = tuple(self.where(_manifest_path(number)) for number in unreadable)
        return Cleaned(len(dropped), deleted, undecided)

    def _remember(self, snapshot: int) -> None:
        """Record in the attempt of a snapshot how it ended, before its manifest is deleted."""
        attempt = self._read_attempt(snapshot)
        if attempt is None or attempt.get("state") != "begun":
            return
        with contextlib.suppress(SnapshotError, StorageError):
            self._write_attempt(attempt | _ending(self.get(snapshot)))

    # ------------------------------------------------------------ files

    def _at(self, path: str) -> str:
        return f"{self._home}/{path}" if path else self._home

    def _ids(self, directory: str) -> list[int]:
        """Return the ids of the snapshots that have a file in `directory`, newest first, ignoring foreign files."""
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
        """Return whether the snapshot of this number is committed."""
        return self.disk.exists(self._at(_manifest_path(snapshot)))

    def _named(self, manifest: Manifest) -> str:
        return self.where(_manifest_path(manifest.snapshot))

    def _write_attempt(self, attempt: dict[str, Any]) -> None:
        self.disk.write(self._at(_attempt_path(attempt["snapshot"])), seal("attempt", attempt))

    def _read_attempt(self, snapshot: int) -> dict[str, Any] | None:
        """Return an attempt; None if it is missing or damaged, because nothing depends on it."""
        path = _attempt_path(snapshot)
        try:
            return unseal("attempt", self.disk.read(self._at(path)), self.where(path))
        except (MissingError, DamagedError):
            return None


def encode_name(name: str) -> str:
    """Return a user's name in a form that is safe in a path and different for different names.

    >>> encode_name("count by/name"), encode_name(".."), encode_name("")
    ('count%20by%2Fname', '%2E%2E', '%')
    """
    encoded = quote(name, safe="", errors="surrogatepass")
    if len(encoded) > 150:  # file systems allow names of 255 bytes
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
    """Return the id that a data file belongs to; None for a foreign file."""
    first = name.partition("/")[0]
    return int(first) if _ID.fullmatch(first) else None


def _manifest_path(snapshot: int) -> str:
    return f"manifests/{_number(snapshot)}.json"


def _attempt_path(snapshot: int) -> str:
    return f"attempts/{_number(snapshot)}.json"
