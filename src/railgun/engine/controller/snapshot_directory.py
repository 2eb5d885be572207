"""Find snapshots in a directory and read the state in them, for people and for `--from`.

A directory of snapshots has one subdirectory for each job that saved there, by its name. Users may name either: the
directory of all jobs, or that of one job.

The state of a step is in several files, of a full snapshot and of the increments since. Rules:

1. For a key the row of the newest snapshot that has one is valid; it may say that the key is deleted. Within one
   snapshot a key may be saved as deleted by its former worker and as alive by its present one: then it is alive.
2. Keys are compared by their hashes.
3. Only the requested values are unpickled. A value that cannot be unpickled here, because its class is missing, is
   still counted, and shown as unreadable.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import numpy as np

from railgun.engine.snapshots.errors import DamagedError, SnapshotError
from railgun.engine.snapshots.manifest import Manifest, Part
from railgun.engine.snapshots.plain import from_json
from railgun.engine.snapshots.store import SnapshotStore
from railgun.errors import ExitCode
from railgun.hashing import Hashes, key_hash
from railgun.lazy import LazyModule
from railgun.storage.errors import MissingError
from railgun.storage.object_store import open_disk

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:  # of an extra, and slow to import: when they are needed
    pa = LazyModule("pyarrow")
    pq = LazyModule("pyarrow.parquet")


_COLUMNS: Final = [
    "hash",
    "key",
    "key_pickle",
    "state",
    "state_pickle",
    "ended",
    "deleted",
    "version",
]
_JOB_FILE: Final = re.compile(r"(?:(.+)/)?(?:manifests|attempts)/\d{12,18}\.json")


class NoSnapshotsError(SnapshotError):
    """The given place has no snapshots."""

    exit_code = ExitCode.USAGE
    kind = "no-snapshot"


def absolute(url: str) -> str:
    """Return a path as an absolute path, and a URL unchanged."""
    return url if "://" in url else os.path.abspath(url)


def find_store(url: str, job: str | None = None) -> tuple[str, SnapshotStore]:
    """Return the snapshots of a job, after the URL of the directory of all jobs.

    `url`: that directory, or the job's own. `job`: the name of the job; None for the only job that has snapshots there.
    Raises `NoSnapshotsError`.
    """
    url = absolute(url).rstrip("/")
    if "://" not in url and not os.path.isdir(url):
        raise NoSnapshotsError(f"there is no directory {url}")
    jobs = jobs_in(url)
    if "" in jobs:  # the directory of one job
        parent, _, name = url.rpartition("/")
        job_name = unquote(name)
        if job not in (None, job_name):
            raise NoSnapshotsError(
                f"{url} has the snapshots of {job_name!r}, not of {job!r}. Snapshots go with the name of a job"
            )
        return parent, SnapshotStore(parent, job_name)
    if not jobs:
        raise NoSnapshotsError(f"there are no snapshots in {url}")
    job_names = ", ".join(map(repr, jobs))
    if job is None and len(jobs) > 1:
        raise NoSnapshotsError(f"{url} has the snapshots of {job_names}: name one of them")
    if job is not None and job not in jobs:
        raise NoSnapshotsError(
            f"{url} has no snapshots of {job!r}; it has those of {job_names}. Snapshots go with the name of a job"
        )
    return url, SnapshotStore(url, job or jobs[0])


def jobs_in(url: str) -> list[str]:
    """Return the jobs that have snapshots in a directory; the empty name stands for the directory of one job."""
    matches = (_JOB_FILE.fullmatch(name) for name in open_disk(url).list(""))
    names = dict.fromkeys(match[1] or "" for match in matches if match)
    return [unquote(name) for name in names if "/" not in name]


def attempts_as_dicts(store: SnapshotStore) -> list[dict[str, Any]]:
    """Return how each snapshot ended, newest first, as plain data; `kept` says whether it still exists."""
    kept = {manifest.snapshot for manifest in store.manifests([])}
    return [asdict(attempt) | {"kept": attempt.snapshot in kept} for attempt in store.attempts()]


# ---------------------------------------------------------------- state


@dataclass(frozen=True, slots=True)
class Row:
    """The saved state of a key."""

    key: Any
    """The key if it is text; otherwise the key as JSON would read it, or as Python shows it."""
    state: Any
    """The state, or `Sealed` if it cannot be unpickled."""
    snapshot: int
    """The number of the snapshot that saved it."""
    worker: int
    version: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Sealed:
    """A state that cannot be unpickled here."""

    size: int
    why: str

    def __repr__(self) -> str:
        return f"<a pickle of {self.size} bytes, not to be opened here: {self.why}>"


class SavedState:
    """The state of one step in a snapshot."""

    def __init__(self, store: SnapshotStore, manifest: Manifest, step: str) -> None:
        self.store = store
        self.manifest = manifest
        self.step = step
        steps = steps_in(manifest)
        if step not in steps:
            step_names = ", ".join(map(repr, steps)) or "none"
            raise MissingError(
                f"snapshot {manifest.snapshot} has no state of a step {step!r}; it has that of {step_names}"
            )
        self._parts = [part for part in manifest.parts if part.step == step]

    def count(self) -> dict[int, int]:
        """Return the number of keys, by the worker that saved them."""
        counts: dict[int, int] = {}
        for part, table in self._tables(["hash", "deleted"]):
            counts[part.worker] = counts.get(part.worker, 0) + len(table)
        return dict(sorted(counts.items()))

    def get(self, key: Any) -> Row | None:
        """Return what is saved of a key, or None."""
        number = np.uint64(key_hash(key))
        for part, table in self._tables(_COLUMNS):
            is_key = _hashes(table) == number
            for row in _rows(part, table.filter(pa.array(is_key))):
                return row
        return None

    def rows(self) -> Iterator[Row]:
        """Yield all rows, the newest first."""
        for part, table in self._tables(_COLUMNS):
            yield from _rows(part, table)

    def _tables(self, columns: list[str]) -> Iterator[tuple[Part, pa.Table]]:
        """Yield the valid rows, file by file, newest snapshot first."""
        newest_first = sorted(self._parts, key=attrgetter("snapshot"), reverse=True)
        seen: Hashes = np.empty(0, dtype=np.uint64)
        for _, group in groupby(newest_first, key=attrgetter("snapshot")):
            group_hashes = [seen]
            for part in group:
                table = self._read(part, columns)
                hashes = _hashes(table)
                deleted = table["deleted"].to_numpy()
                valid = ~deleted & ~np.isin(hashes, seen)
                group_hashes.append(hashes)
                if valid.any():
                    yield part, table.filter(pa.array(valid))
            seen = np.unique(np.concatenate(group_hashes))

    def _read(self, part: Part, columns: list[str]) -> pa.Table:
        data = self.store.read_part(part)
        try:
            return pq.read_table(pa.BufferReader(data), columns=columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DamagedError(f"{self.store.where(part.path)} cannot be read: {error}") from error


def steps_in(manifest: Manifest) -> list[str]:
    """Return the steps that have state in a snapshot."""
    kinds = [step.name for step in manifest.steps if step.kind != "sink"]
    return list(dict.fromkeys([*kinds, *(part.step for part in manifest.parts)]))


def _hashes(table: pa.Table) -> Hashes:
    hashes: Hashes = table["hash"].to_numpy().view(np.uint64)
    return hashes


def _rows(part: Part, table: pa.Table) -> Iterator[Row]:
    for batch in table.to_batches(1024):
        for row in batch.to_pylist():
            yield Row(
                _key(row["key"], row["key_pickle"]),
                _state(row["state"], row["state_pickle"]),
                part.snapshot,
                part.worker,
                row["version"],
                row["ended"],
            )


def _key(text: str, pickled: bytes | None) -> Any:
    if pickled is None:
        return text
    try:
        return from_json([text])[0]
    except (ValueError, RecursionError):
        return text


def _state(text: str | None, pickled: bytes | None) -> Any:
    if text is not None:
        return from_json([text])[0]
    if pickled is None:
        return None
    try:
        return pickle.loads(pickled)
    except Exception as error:
        return Sealed(len(pickled), f"{type(error).__name__}: {error}")
