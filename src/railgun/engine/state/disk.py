"""State on disk: keys that were touched lately are in memory, the others in a database, which is scratch.

How it is kept, for one step (`DiskStore`):

1. A key is *hot* (in `states`) or *cold* (on disk only). `fetch` makes keys hot, one read for all of them.
2. What is on disk of a hot key is its *copy*: out of date, and not looked at. So bringing a key in writes nothing, and
   the copy is written over when the key goes cold again. A hot key that is forgotten leaves its copy behind; the next
   `fetch` deletes it, which is why only keys that were fetched may be touched.
3. When hot keys take more memory than they should, `fetch` first writes the coldest out, one write for all of them, and
   never more than in proportion to the batch: a batch does not wait for what others have left.
4. What was touched when is known by *ages*, sets of keys: the present one takes the keys of every batch, and is
   followed by another when it has grown to a part of what fits. The coldest keys are those of the oldest age that are
   in no later one. So nothing is done for a single key when it is touched.
5. A key is found by its stable hash, under which lies its *record*: the key and its state, pickled. Equal keys hash
   equal, whatever they are pickled to. Keys that are not equal and share a hash share the record: such hashes are known
   (`_shared`), since a record is written over unseen only where it is certain to be of this key alone.
6. A key that is not equal to itself after pickling (one with a NaN in it) would never be found again, and stays hot.

Nothing here survives the process: snapshots are what keeps state safe.
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
AGES: Final = 16  # the present age ends when it has one part in so many of the keys that fit
MOST_AGES: Final = 2 * AGES
FEW: Final = 1_024
SAMPLES: Final = 2  # states of each batch whose size is looked at
STRIDE: Final = 7_919
SMOOTH: Final = 0.05  # what one of them counts
OVERHEAD: Final = (
    260  # bytes of memory a hot key takes beside key and state: places in dicts and sets
)
_PLAIN: Final = frozenset({str, int, bytes, bool, type(None)})
_HEAD: Final = struct.Struct("<II")  # lengths of the pickled key and state
_PREFIX: Final = struct.Struct(">H")


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Keep state on disk, and in memory what was used lately: about `memory` bytes in each worker.

    `directory` is where, on the machines of the workers: a fast local disk. By default where the system has its
    temporary files. Nothing in it is of use after the worker has ended; it deletes it, or the next one does.
    """

    memory: int = 256 * MIB
    directory: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.memory, int) or self.memory < 1:
            raise StateError(f"memory is a number of bytes, not {self.memory!r}")


class Disk:
    """The state on disk of one worker: stores for its steps, which share memory and a database.

    The database and its directory are made when something has to be written for the first time.
    """

    def __init__(self, on: OnDisk | None = None) -> None:
        self.on = on or OnDisk()
        self.stores: list[DiskStore] = []
        self._rocks: Rocks | None = None
        self._finalizer: weakref.finalize[..., Disk] | None = None

    def store(self, step: str) -> DiskStore:
        """A store for a step."""
        made = DiskStore(self, len(self.stores), step)
        self.stores.append(made)
        return made

    @property
    def rocks(self) -> Rocks:
        """The database."""
        if self._rocks is None:
            scratch = Scratch(self.on.directory)
            path = str(scratch.path / "db")
            self._rocks = Rocks(path, cache=self.on.memory // 4, buffers=self.on.memory // 8)
            self._finalizer = weakref.finalize(self, _end, self._rocks, scratch)
        return self._rocks

    def share(self, store: DiskStore) -> float:
        """The bytes that hot keys of this store may take: what the others leave, and its part at least."""
        all_of_it = self.on.memory * 5 / 8  # the rest is the database's
        others = sum(other.memory for other in self.stores if other is not store)
        return max(all_of_it / len(self.stores), all_of_it - others)

    def close(self) -> None:
        """Delete everything."""
        if self._finalizer is not None:
            self._finalizer()
            self._rocks = self._finalizer = None


def _end(rocks: Rocks, scratch: Scratch) -> None:
    rocks.close()  # first: it has threads that write
    scratch.close()


class DiskStore(KeyStore):
    """The state of one step's keys, hot ones in memory and cold ones on disk."""

    __slots__ = (
        "_ages", "_candidates", "_copies", "_each", "_fetched", "_first", "_next", "_on_disk", "_sampled", "_shared",
        "_stuck", "disk", "step",
    )  # fmt: skip

    def __init__(self, disk: Disk, number: int, step: str) -> None:
        super().__init__()
        self.disk = disk
        self.step = step
        self._first, self._next = _PREFIX.pack(number), _PREFIX.pack(number + 1)
        self._on_disk = 0  # keys, copies among them
        self._copies: set[Any] = set()  # hot keys that are on disk too
        self._shared: set[bytes] = set()  # names under which several keys are, or have been
        self._fetched: Sequence[Any] = ()  # the keys that may have been touched since
        self._ages: deque[set[Any]] = deque([set()])
        self._candidates: list[Any] = []  # the coldest keys, unless they were touched since
        self._stuck: set[Any] = set()  # keys that cannot leave memory
        self._sampled = 0
        self._each = 0.0  # bytes of memory a hot key takes

    def __repr__(self) -> str:
        return f"DiskStore({self.step!r}, {len(self.states)} of {len(self)} keys in memory)"

    @property
    def spilled(self) -> bool:
        """Whether anything is on disk."""
        return self._on_disk > 0

    @property
    def memory(self) -> float:
        """The bytes that hot keys take, about."""
        return self._each * len(self.states)

    @property
    def room(self) -> int:
        """How many keys may be hot."""
        return int(self.disk.share(self) / self._each) if self._each else FEW

    def __len__(self) -> int:
        self._settle()
        return len(self.states) + self._on_disk - len(self._copies)

    # ------------------------------------------------------------ what steps do

    def fetch(self, keys: Sequence[Any]) -> None:
        """Bring these keys in, after others have made room."""
        self._settle()
        self._weigh()
        self._age(keys)
        missing: set[Any] = set()
        if self._on_disk > len(self._copies):
            missing = set(keys).difference(self.states)
        excess = len(self.states) + len(missing) - self.room
        if excess > 0:
            self._make_room(min(excess, 2 * len(keys) + FEW), keys)
        if missing:
            self._bring(list(missing))
        self._fetched = keys

    def put(self, keys: list[Any], states: list[Any]) -> None:
        """Take keys in, and others out if there is no room."""
        self.fetch(keys)
        self.states.update(zip(keys, states, strict=True))

    def census(self, block: int = BLOCK) -> Iterator[list[Any]]:
        """The hot keys, then the cold ones as they are now."""
        cut = self.cut(block, only_keys=True)
        return chain(blocks(cut.hot, block), (keys for keys, _ in cut.cold))

    def cut(self, block: int = BLOCK, *, only_keys: bool = False) -> Cut:
        """The hot keys, and a view of the cold ones."""
        self._settle()
        hot = list(self.states)
        cold = self._on_disk - len(self._copies)
        if not cold:
            return Cut(hot, iter(()))
        rows = self.disk.rocks.scan(self._first, self._next)
        return Cut(hot, self._view(rows, self._copies.copy(), cold, block, only_keys))

    # ------------------------------------------------------------ what was touched, and when

    def _settle(self) -> None:
        """Delete the copies of keys that were forgotten."""
        if self._copies and self._fetched:
            states = self.states
            forgotten = [
                key for key in self._copies.intersection(self._fetched) if key not in states
            ]
            if forgotten:
                self._delete(forgotten)

    def _weigh(self) -> None:
        """Look at the size of some states of the last batch, not always at the same place in it."""
        for _ in range(min(SAMPLES, len(self._fetched))):
            self._sampled += STRIDE
            key = self._fetched[self._sampled % len(self._fetched)]
            state = self.states.get(key, _ABSENT)
            if state is not _ABSENT:
                size = OVERHEAD + size_of(key) + size_of(state)
                self._each += (size - self._each) * (SMOOTH if self._each else 1.0)

    def _age(self, keys: Sequence[Any]) -> None:
        ages = self._ages
        ages[-1].update(keys)
        if len(ages[-1]) * AGES >= self.room:
            ages.append(set(keys))
            if len(ages) > MOST_AGES:  # the oldest two become one
                ages[0] |= ages[1]
                del ages[1]
                if len(ages[0]) > 2 * len(self.states) + FEW:  # many of them were forgotten
                    ages[0] = {key for key in ages[0] if key in self.states}

    def _coldest(self, most: int) -> list[Any]:
        """Some of the keys that were not touched for longest; none: there are none but those of the present batch."""
        while True:
            while not self._candidates:
                if len(self._ages) == 1:
                    return []
                self._candidates = list(self._less(self._ages.popleft(), self._ages))
            some, self._candidates[-most:] = self._candidates[-most:], []
            found = [key for key in self._less(set(some), self._ages) if key in self.states]
            if found:
                return found

    @staticmethod
    def _less(keys: set[Any], others: Iterable[set[Any]]) -> set[Any]:
        for other in others:
            keys = keys - other
        return keys

    def _make_room(self, excess: int, keys: Sequence[Any]) -> None:
        """Write so many of the coldest keys out, but none of these."""
        anew = False
        while excess > 0:
            coldest = self._coldest(excess)
            if coldest:
                self._write_out(coldest)
                excess -= len(coldest)
            elif not anew:  # all are of the present age, which is too large then
                self._ages = deque([set(self.states) - self._stuck, set(keys)])
                anew = True
            else:
                break

    # ------------------------------------------------------------ to disk and back

    def _named(self, keys: list[Any]) -> tuple[list[Any], list[bytes]]:
        """These keys in the order of the disk, and what they have their records under."""
        hashes = hash_keys(keys)
        order = np.argsort(hashes)
        packed, first = hashes[order].astype(">u8").tobytes(), self._first
        names = [first + packed[at : at + 8] for at in range(0, len(packed), 8)]
        return [keys[row] for row in order.tolist()], names

    def _bring(self, keys: list[Any]) -> None:
        keys, names = self._named(keys)
        states, copies = self.states, self._copies
        loads, head = pickle.loads, _HEAD.size
        for key, name, record in zip(keys, names, self.disk.rocks.read(names), strict=True):
            if record is None:
                continue
            found = loads(record[head:])  # what follows the key is not looked at
            if found == key:
                begin = head + _HEAD.unpack_from(record)[0]
                states[found] = loads(record[begin:])
                copies.add(found)
                continue
            self._shared.add(name)
            for stored, state in _entries(record):
                found = loads(stored)
                if found == key:
                    states[found] = loads(state)
                    copies.add(found)

    def _write_out(self, keys: list[Any]) -> None:
        """Make these keys cold."""
        states, shared, copies = self.states, self._shared, self._copies
        entries = {}
        for key in keys:
            entry = self._entry(key, states[key])
            if entry is not None:
                entries[key] = entry
        if not entries:
            return
        keys, names = self._named(list(entries))
        # Where the key has no copy there may be one of another key.
        unsure = [
            name
            for key, name in zip(keys, names, strict=True)
            if key not in copies or name in shared
        ]
        there = dict(zip(unsure, self.disk.rocks.read(unsure), strict=True)) if unsure else {}
        records: dict[bytes, bytes] = {}
        for key, name in zip(keys, names, strict=True):
            entry = entries[key]
            before = records.get(name) or there.get(name)
            if before is None:
                records[name] = entry
            else:
                shared.add(name)
                records[name] = _without(before, key) + entry
        self.disk.rocks.write(records)
        for key in keys:
            del states[key]
        self._on_disk += len(keys)
        before_this = len(copies)
        copies.difference_update(keys)
        self._on_disk -= before_this - len(copies)

    def _delete(self, keys: list[Any]) -> None:
        keys, names = self._named(keys)
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
        """Key and state as bytes; None: the key cannot leave memory."""
        try:
            name, data = dumps(key), dumps(state)
        except BaseException as error:
            pass_interrupt(error)
            raise UnpicklableStateError(
                f"step {self.step!r}: the state of key {key!r:.200} cannot be kept on disk, because it cannot be "
                f"pickled: {error}"
            ) from error
        if type(key) not in _PLAIN and pickle.loads(name) != key:
            self._stuck.add(key)
            return None
        return _HEAD.pack(len(name), len(data)) + name + data

    def _view(
        self,
        rows: Iterator[tuple[bytes, bytes]],
        copies: set[Any],
        expected: int,
        size: int,
        only_keys: bool,
    ) -> Iterator[Block]:
        """The cold keys in blocks. An iterator of the database ends when it cannot read on: so they are counted."""
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
    """The keys and states of a record, pickled: mostly one."""
    view = memoryview(record)
    at, found = 0, []
    while at < len(record):
        named, saved = _HEAD.unpack_from(record, at)
        at += _HEAD.size
        found.append((view[at : at + named], view[at + named : at + named + saved]))
        at += named + saved
    return found


def _without(record: bytes, key: Any) -> bytes:
    """A record but for one key."""
    return b"".join(
        _HEAD.pack(len(stored), len(state)) + stored + state
        for stored, state in _entries(record)
        if pickle.loads(stored) != key
    )
