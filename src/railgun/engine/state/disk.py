"""Keep state on disk: recently used keys are in memory, the others in a database that is deleted with the process.

How the state of one step is kept (`DiskStore`):

1. A key is *hot* (in `states`) or *cold* (on disk only). `fetch` makes keys hot, with one read for all of them.
2. What the disk holds of a hot key is its *copy*, which is outdated and never read. So loading a key writes nothing,
   and the copy is overwritten when the key becomes cold again. A hot key whose state is deleted leaves its copy behind;
   the next `fetch` deletes the copy, which is why only keys that were fetched may be touched.
3. When hot keys take more memory than their share, `fetch` first writes the coldest of them to disk, with one write for
   all, and never more than in proportion to the batch: a batch does not pay for the backlog of others.
4. *Ages*, sets of keys, tell which keys were used when: the current age collects the keys of every batch, and a new age
   begins when it has grown to a fraction of the keys that fit. The coldest keys are those of the oldest age that are in
   no later age. So using a single key costs no bookkeeping of its own.
5. A key is found by its stable hash, under which its *record* is stored: the key and its state, pickled. Equal keys
   have equal hashes, even if their pickles differ. Keys that are not equal but share a hash share the record: such
   hashes are remembered (`_shared`), because a record may be overwritten without reading it only if it certainly holds
   this key alone.
6. A key that does not equal itself after pickling (for example with a NaN in it) would never be found again, so it
   stays hot.

Nothing here survives the process: snapshots keep state safe.
"""

from __future__ import annotations

import pickle
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

from railgun.engine.state.errors import StateError, UnpicklableStateError
from railgun.engine.state.rocks import Rocks
from railgun.engine.state.scratch import Scratch
from railgun.engine.state.sizes import size_of
from railgun.engine.state.store import BLOCK, Block, Cut, KeyStore, blocks
from railgun.errors import pass_interrupt
from railgun.hashing import hash_keys
from railgun.transport.pickling import dumps

MIB: Final = 1 << 20
AGES: Final = 16  # the current age ends when it holds 1/AGES of the keys that fit into memory
MAX_AGES: Final = 2 * AGES
MIN_KEYS: Final = 1_024
SAMPLED_STATES: Final = 2  # of each batch, whose size is estimated
SAMPLE_STRIDE: Final = 7_919  # keys from one sample to the next
SAMPLE_WEIGHT: Final = 0.05  # of one sample in the moving average
# Memory that a hot key takes besides key and state: entries of dicts and sets.
OVERHEAD_BYTES: Final = 260
_PLAIN: Final = frozenset({str, int, bytes, bool, type(None)})
_HEAD: Final = struct.Struct("<II")  # lengths of the pickled key and state
_PREFIX: Final = struct.Struct(">H")


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Keep state on disk, and recently used state in memory: about `memory` bytes in each worker.

    `directory`: where to keep it on the workers' machines, best on a fast local disk. Default: where the system has its
    temporary files. Its content is useless after the worker has ended: the worker deletes it, or the next worker does.
    """

    memory: int = 256 * MIB
    directory: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.memory, int) or self.memory < 1:
            raise StateError(f"memory is a number of bytes, not {self.memory!r}")


class Disk:
    """The state on disk of one worker: stores for its steps, which share memory and a database.

    The database and its directory are made by the first write.
    """

    def __init__(self, on: OnDisk | None = None) -> None:
        self.on = on or OnDisk()
        self.stores: list[DiskStore] = []
        self._rocks: Rocks | None = None
        self._finalizer: weakref.finalize[..., Disk] | None = None

    def store(self, step: str) -> DiskStore:
        """Make and return the store of a step."""
        store = DiskStore(self, len(self.stores), step)
        self.stores.append(store)
        return store

    @property
    def rocks(self) -> Rocks:
        """Return the database; the first call makes it."""
        if self._rocks is None:
            scratch = Scratch(self.on.directory)
            path = str(scratch.path / "db")
            self._rocks = Rocks(path, cache=self.on.memory // 4, buffers=self.on.memory // 8)
            self._finalizer = weakref.finalize(self, _end, self._rocks, scratch)
        return self._rocks

    def share(self, store: DiskStore) -> float:
        """Return the bytes that the hot keys of `store` may take: what other stores leave, at least an equal share."""
        total = self.on.memory * 5 / 8  # the database uses the rest
        used_by_others = sum(sibling.memory for sibling in self.stores if sibling is not store)
        return max(total / len(self.stores), total - used_by_others)

    def close(self) -> None:
        """Close the database and delete its directory."""
        if self._finalizer is not None:
            self._finalizer()
            self._rocks = self._finalizer = None


def _end(rocks: Rocks, scratch: Scratch) -> None:
    rocks.close()  # first, because its threads still write
    scratch.close()


class DiskStore(KeyStore):
    """The state of one step's keys: hot keys in memory, cold keys on disk."""

    __slots__ = (
        "_ages", "_candidates", "_copies", "_fetched", "_first", "_key_bytes", "_next", "_on_disk", "_sampled",
        "_shared", "_unsaveable", "disk", "step",
    )  # fmt: skip

    def __init__(self, disk: Disk, number: int, step: str) -> None:
        super().__init__()
        self.disk = disk
        self.step = step
        self._first, self._next = _PREFIX.pack(number), _PREFIX.pack(number + 1)
        self._on_disk = 0  # keys on disk, including copies
        self._copies: set[Any] = set()  # hot keys that are on disk too
        self._shared: set[bytes] = set()  # names whose records hold or held several keys
        self._fetched: Sequence[Any] = ()  # keys of the last `fetch`, which may have been touched
        self._ages: deque[set[Any]] = deque([set()])
        self._candidates: list[Any] = []  # the coldest keys, unless they were used meanwhile
        self._unsaveable: set[Any] = set()  # keys that cannot leave memory
        self._sampled = 0
        self._key_bytes = 0.0  # average memory of a hot key with its state

    def __repr__(self) -> str:
        return f"DiskStore({self.step!r}, {len(self.states)} of {len(self)} keys in memory)"

    @property
    def spilled(self) -> bool:
        """Return whether any state is on disk."""
        return self._on_disk > 0

    @property
    def memory(self) -> float:
        """Return the estimated bytes of memory of all hot keys."""
        return self._key_bytes * len(self.states)

    @property
    def room(self) -> int:
        """Return the number of keys that may be hot."""
        return int(self.disk.share(self) / self._key_bytes) if self._key_bytes else MIN_KEYS

    def __len__(self) -> int:
        self._settle()
        return len(self.states) + self._on_disk - len(self._copies)

    # ------------------------------------------------------------ what steps do

    def fetch(self, keys: Sequence[Any]) -> None:
        """Load `keys` into `states`, after writing out other keys if memory is short."""
        self._settle()
        self._sample_sizes()
        self._note_use(keys)
        missing: set[Any] = set()
        if self._on_disk > len(self._copies):
            missing = set(keys).difference(self.states)
        excess = len(self.states) + len(missing) - self.room
        if excess > 0:
            self._make_room(min(excess, 2 * len(keys) + MIN_KEYS), keys)
        if missing:
            self._load_keys(list(missing))
        self._fetched = keys

    def put(self, keys: list[Any], states: list[Any]) -> None:
        """Add keys with their states, and write others out if memory is short."""
        self.fetch(keys)
        self.states.update(zip(keys, states, strict=True))

    def census(self, block: int = BLOCK) -> Iterator[list[Any]]:
        """Yield the hot keys, then the cold ones as they are now."""
        cut = self.cut(block, only_keys=True)
        return chain(blocks(cut.hot, block), (keys for keys, _ in cut.cold))

    def cut(self, block: int = BLOCK, *, only_keys: bool = False) -> Cut:
        """Return the hot keys and a view of the cold ones. With `only_keys` the view yields no states."""
        self._settle()
        hot = list(self.states)
        cold = self._on_disk - len(self._copies)
        if not cold:
            return Cut(hot, iter(()))
        rows = self.disk.rocks.scan(self._first, self._next)
        return Cut(hot, self._view(rows, self._copies.copy(), cold, block, only_keys))

    # ------------------------------------------------------------ which keys were used, and when

    def _settle(self) -> None:
        """Delete the copies of keys whose state was deleted."""
        if self._copies and self._fetched:
            states = self.states
            deleted = [key for key in self._copies.intersection(self._fetched) if key not in states]
            if deleted:
                self._delete(deleted)

    def _sample_sizes(self) -> None:
        """Update the average size from a few states of the last batch, not always at the same place in it."""
        for _ in range(min(SAMPLED_STATES, len(self._fetched))):
            self._sampled += SAMPLE_STRIDE
            key = self._fetched[self._sampled % len(self._fetched)]
            state = self.states.get(key, _ABSENT)
            if state is not _ABSENT:
                size = OVERHEAD_BYTES + size_of(key) + size_of(state)
                self._key_bytes += (size - self._key_bytes) * (
                    SAMPLE_WEIGHT if self._key_bytes else 1.0
                )

    def _note_use(self, keys: Sequence[Any]) -> None:
        ages = self._ages
        ages[-1].update(keys)
        if len(ages[-1]) * AGES >= self.room:
            ages.append(set(keys))
            if len(ages) > MAX_AGES:  # the oldest two become one
                ages[0] |= ages[1]
                del ages[1]
                if len(ages[0]) > 2 * len(self.states) + MIN_KEYS:  # many have no state any more
                    ages[0] = {key for key in ages[0] if key in self.states}

    def _coldest(self, most: int) -> list[Any]:
        """Return up to `most` of the least recently used keys; none if only keys of the current age are left."""
        while True:
            while not self._candidates:
                if len(self._ages) == 1:
                    return []
                self._candidates = list(self._without_keys(self._ages.popleft(), self._ages))
            candidates, self._candidates[-most:] = self._candidates[-most:], []
            coldest = [
                key for key in self._without_keys(set(candidates), self._ages) if key in self.states
            ]
            if coldest:
                return coldest

    @staticmethod
    def _without_keys(keys: set[Any], exclusions: Iterable[set[Any]]) -> set[Any]:
        for excluded in exclusions:
            keys = keys - excluded
        return keys

    def _make_room(self, excess: int, keys: Sequence[Any]) -> None:
        """Write about `excess` of the coldest keys to disk, but none of `keys`."""
        restarted = False
        while excess > 0:
            coldest = self._coldest(excess)
            if coldest:
                self._write_out(coldest)
                excess -= len(coldest)
            elif not restarted:  # all hot keys are of the current age, which is too large
                self._ages = deque([set(self.states) - self._unsaveable, set(keys)])
                restarted = True
            else:
                break

    # ------------------------------------------------------------ to disk and back

    def _sorted_names(self, keys: list[Any]) -> tuple[list[Any], list[bytes]]:
        """Return `keys` in the order of the disk, and the names of their records."""
        hashes = hash_keys(keys)
        order = np.argsort(hashes)
        packed, first = hashes[order].astype(">u8").tobytes(), self._first
        names = [first + packed[at : at + 8] for at in range(0, len(packed), 8)]
        return [keys[row] for row in order.tolist()], names

    def _load_keys(self, keys: list[Any]) -> None:
        keys, names = self._sorted_names(keys)
        states, copies = self.states, self._copies
        loads, head = pickle.loads, _HEAD.size
        for key, name, record in zip(keys, names, self.disk.rocks.read(names), strict=True):
            if record is None:
                continue
            stored_key = loads(record[head:])  # pickle ignores the bytes after the key
            if stored_key == key:
                begin = head + _HEAD.unpack_from(record)[0]
                states[stored_key] = loads(record[begin:])
                copies.add(stored_key)
                continue
            self._shared.add(name)
            for stored, state in _entries(record):
                stored_key = loads(stored)
                if stored_key == key:
                    states[stored_key] = loads(state)
                    copies.add(stored_key)

    def _write_out(self, keys: list[Any]) -> None:
        """Write the states of `keys` to disk and remove them from memory."""
        states, shared, copies = self.states, self._shared, self._copies
        entries = {}
        for key in keys:
            entry = self._entry(key, states[key])
            if entry is not None:
                entries[key] = entry
        if not entries:
            return
        keys, names = self._sorted_names(list(entries))
        # The name of a key that has no copy may hold the record of another key.
        unsure = [
            name
            for key, name in zip(keys, names, strict=True)
            if key not in copies or name in shared
        ]
        stored = dict(zip(unsure, self.disk.rocks.read(unsure), strict=True)) if unsure else {}
        records: dict[bytes, bytes] = {}
        for key, name in zip(keys, names, strict=True):
            entry = entries[key]
            previous = records.get(name) or stored.get(name)
            if previous is None:
                records[name] = entry
            else:
                shared.add(name)
                records[name] = _without(previous, key) + entry
        self.disk.rocks.write(records)
        for key in keys:
            del states[key]
        self._on_disk += len(keys)
        copies_before = len(copies)
        copies.difference_update(keys)
        self._on_disk -= copies_before - len(copies)

    def _delete(self, keys: list[Any]) -> None:
        keys, names = self._sorted_names(keys)
        gone: dict[bytes, None] = {}
        records: dict[bytes, bytes] = {}
        for key, name in zip(keys, names, strict=True):
            record = b""
            if name in self._shared:
                record = _without(records.get(name) or self.disk.rocks.read([name])[0] or b"", key)
            if record:
                records[name] = record
            else:
                gone[name] = None
                records.pop(name, None)
        self.disk.rocks.write(records, gone)
        self._copies.difference_update(keys)
        self._on_disk -= len(keys)

    def _entry(self, key: Any, state: Any) -> bytes | None:
        """Return key and state as bytes; None if the key cannot leave memory. Raises `UnpicklableStateError`."""
        try:
            key_bytes, state_bytes = dumps(key), dumps(state)
        except BaseException as error:
            pass_interrupt(error)
            raise UnpicklableStateError(
                f"step {self.step!r}: the state of key {key!r:.200} cannot be kept on disk, because it cannot be "
                f"pickled: {error}"
            ) from error
        if type(key) not in _PLAIN and pickle.loads(key_bytes) != key:
            self._unsaveable.add(key)
            return None
        return _HEAD.pack(len(key_bytes), len(state_bytes)) + key_bytes + state_bytes

    def _view(
        self,
        rows: Iterator[tuple[bytes, bytes]],
        copies: set[Any],
        expected: int,
        size: int,
        only_keys: bool,
    ) -> Iterator[Block]:
        """Yield the cold keys with their states, in blocks.

        An iterator of the database ends early if it cannot read on. So the keys are counted, and `StateError` is raised
        if some of the `expected` ones are missing.
        """
        keys: list[Any] = []
        states: list[Any] = []
        for _, record in rows:
            for stored, state in _entries(record):
                key = pickle.loads(stored)
                if key not in copies:
                    keys.append(key)
                    if not only_keys:
                        states.append(pickle.loads(state))
            if len(keys) >= size:
                expected -= len(keys)
                yield keys, states
                keys, states = [], []
        if keys:
            yield keys, states
        if expected != len(keys):
            raise StateError(
                f"step {self.step!r}: {expected - len(keys)} keys cannot be read from {self.disk.rocks.path}: is the "
                "disk damaged? The flow has to start again from its last snapshot"
            )


_ABSENT: Final = object()


def _entries(record: bytes) -> Iterable[tuple[memoryview, memoryview]]:
    """Return the pickled keys and states of a record, which mostly holds one key."""
    view = memoryview(record)
    at, entries = 0, []
    while at < len(record):
        key_size, state_size = _HEAD.unpack_from(record, at)
        at += _HEAD.size
        entries.append((view[at : at + key_size], view[at + key_size : at + key_size + state_size]))
        at += key_size + state_size
    return entries


def _without(record: bytes, key: Any) -> bytes:
    """Return a record without the entry of `key`."""
    return b"".join(
        _HEAD.pack(len(stored), len(state)) + stored + state
        for stored, state in _entries(record)
        if pickle.loads(stored) != key
    )
