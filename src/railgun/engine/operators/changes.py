"""Track which keys of an operator changed since the last snapshot, and save them with the next.

A snapshot is of one moment, its cut, and must not stop the flow however much there is to save. So at the cut only the
set of keys to save is put aside. They are encoded in pieces (`step`) while records flow, and a key that is about to
change, or to leave, is encoded just before (`touch`, `preserve`). Rules:

1. An operator calls `touch` before it changes the state of keys.
2. A *full* snapshot saves every key that has state at the cut. Otherwise it saves those that changed since the last
   committed snapshot; a key that has no state any more is saved as deleted.
3. If a snapshot is not committed, the keys it was to save count as changed again.
4. A key that moves takes along whether it changed, and whether it is part of a snapshot not settled yet; for its new
   owner both mean that it changed.
5. A key that comes after the cut was saved by its former owner. So before it is added it is preserved in the form it
   had here at the cut: absent.

Where a few thousand keys change again and again, noting the key of every record costs more than all the rest of a
snapshot. So once nearly all keys have changed, the others count as changed too, and keys are not noted any more
(`all_changed`):

6. When `all_changed` is set, every key that has state is in `changed`. A key that gets state later is found in the
   store at the next cut. If it has lost its state by then, every snapshot with a state of it was told, or will be
   told, that the key is deleted: the key had none when `all_changed` was set, so it is in `changed` or `in_flight`.
7. That holds as long as no key comes from another worker or goes to one. So before one does, and at the cut, all keys
   of the store are noted (`_note_all`); from then on each key is noted again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, compress, islice
from operator import not_
from typing import TYPE_CHECKING, Any, Final

from railgun.engine.operators.calls import PICKLE, KeyCalls, ValueCalls
from railgun.engine.state.store import MemoryStore
from railgun.hashing import hash_keys
from railgun.transport.pickling import dumps

if TYPE_CHECKING:
    from railgun.engine.operators.keyed import Keyed
    from railgun.engine.snapshots.table import TableWriter

BLOCK_KEYS: Final = 500  # keys saved at once
# The largest store that may count as changed as a whole: noting so many keys takes 2 ms.
MAX_ALL_CHANGED_KEYS: Final = 1 << 16
MAX_UNCHANGED_SHARE: Final = 1 / 32  # share of its keys that may be saved without need then
LOOK_INTERVAL_PER_KEY: Final = 4  # records per key between two looks for keys that have not changed
FEW_KEYS: Final = 8  # up to so many keys, checking their types costs less than entering a call
BUILT_IN: Final = frozenset({int, str, bytes, float, bool, type(None)})
"""Types of keys whose lookup calls no user code."""
_NONE: Final = object()


class Changes:
    """The changed keys of one operator, and the snapshot that is being saved."""

    __slots__ = (
        "_done", "_full", "_keys", "_left", "_table", "_touched", "all_changed", "changed", "in_flight", "operator",
    )  # fmt: skip

    def __init__(self, operator: Keyed) -> None:
        self.operator = operator
        self.changed: set[Any] = set()
        # Keys that had changed at the cut of the unsettled snapshot.
        self.in_flight: set[Any] = set()
        self.all_changed = False  # whether every key of the store counts as changed, noted or not
        self._touched = 0  # keys touched since the last look for unchanged keys
        self._table: TableWriter | None = None
        self._full = False
        self._keys: Iterator[Any] = iter(())  # keys to save with a full snapshot
        self._done: set[Any] = set()  # keys saved with a full snapshot
        self._left: set[Any] = set()  # keys not yet saved with an incremental snapshot

    def touch(self, keys: Collection[Any], records: Sequence[Any] = ()) -> None:
        """Note that these keys are about to change; first save those that a snapshot needs as they are now.

        `records` are those that change the keys, to be named if the code of a key fails.
        """
        count = len(self.operator.states)
        if self.all_changed and count <= MAX_ALL_CHANGED_KEYS and self._table is None:
            return
        if len(keys) <= FEW_KEYS and BUILT_IN.issuperset(map(type, keys)):
            # For example the key of a timer that fires.
            self._touch(keys, None)
            return
        with KeyCalls(self.operator.step, keys, records) as call:
            call.try_keys(self.changed, self.operator.states)
            self._touch(keys, call)

    def _touch(self, keys: Collection[Any], call: KeyCalls | None) -> None:
        count = len(self.operator.states)
        if count > MAX_ALL_CHANGED_KEYS:
            self._note_all()
        if not self.all_changed:
            if call is None:
                self.changed.update(keys)
            else:
                self.changed.update(call.walk())
                call.walked()
            self._touched += len(keys)
            if self._touched > LOOK_INTERVAL_PER_KEY * count:
                self._look()
        if self._table is not None:
            self.preserve(keys)

    def _look(self) -> None:
        """Let all keys count as changed if nearly all have changed, and the store is small and in memory."""
        self._touched = 0
        states = self.operator.states
        if len(states) > MAX_ALL_CHANGED_KEYS or not isinstance(self.operator.store, MemoryStore):
            return
        most = MAX_UNCHANGED_SHARE * len(states)
        if len(states) - len(self.changed) > most:
            return
        unchanged = states.keys() - self.changed  # many, if many changed keys were deleted
        if len(unchanged) <= most:
            self.changed |= unchanged
            self.all_changed = True

    def _note_all(self) -> None:
        """Note the keys that changed and were not noted; from now on note single keys again."""
        if self.all_changed:
            self.changed.update(self.operator.states)
            self.all_changed = False
            self._touched = 0

    # ------------------------------------------------------------ a snapshot

    def cut(self, table: TableWriter, full: bool) -> None:
        """Begin a snapshot of this moment, whose rows go to `table`; a `full` one saves every key."""
        with KeyCalls(self.operator.step):
            self._note_all()
            self.in_flight |= self.changed
        self.changed = set()
        self._touched = 0
        self._table, self._full = table, full
        if full:
            self._keys, self._done = chain.from_iterable(self.operator.store.census()), set()
        else:
            self._left = self.in_flight.copy()

    @property
    def saving(self) -> bool:
        """Return whether keys are left to save."""
        return self._table is not None

    def step(self) -> None:
        """Save a block of keys; end the snapshot if none is left."""
        if self._full:
            block = list(islice(self._keys, BLOCK_KEYS))
            if block:
                with KeyCalls(self.operator.step, block):
                    self.preserve(block)
                return
        elif self._left:
            pop = self._left.pop
            block = [pop() for _ in range(min(BLOCK_KEYS, len(self._left)))]
            with KeyCalls(self.operator.step, block):
                self._save(block)
            return
        self.give_up()

    def preserve(self, keys: Collection[Any]) -> None:
        """Save those of these keys that are part of the snapshot and not saved yet, as they are."""
        if self._table is None:
            return
        if self._full:
            fresh = set(keys).difference(self._done)
            self._done |= fresh
        else:
            fresh = self._left.intersection(keys)
            self._left -= fresh
        if fresh:
            self._save(list(fresh))

    def _save(self, keys: list[Any]) -> None:
        operator, table = self.operator, self._table
        assert table is not None
        operator.fetch_missing(keys)
        get = operator.states.get
        states = [get(key, _NONE) for key in keys]
        missing = [state is _NONE for state in states]
        deleted = missing if any(missing) else None
        if deleted is not None:
            if self._full:  # such keys were added after the cut
                present = list(map(not_, missing))
                keys, states, deleted = (
                    list(compress(keys, present)),
                    list(compress(states, present)),
                    None,
                )
                if not keys:
                    return
            else:
                states = [None if state is _NONE else state for state in states]
        saved = operator.saved(keys, states)
        timers = operator.timers.of(keys) if operator.timers else None
        ended = [key in operator.ended for key in keys] if operator.ended else None
        hashes = hash_keys(keys)
        with ValueCalls(operator.step, PICKLE, "key", keys, owners=saved) as call:
            call.try_each(dumps, saved)
            call.try_each(dumps, keys)
            table.add(hashes, keys, saved, timers, ended, deleted)

    def settle(self, committed: bool) -> None:
        """Settle the snapshot: if it was not committed, the keys it was to save count as changed again."""
        if not committed:
            with KeyCalls(self.operator.step):
                self.changed |= self.in_flight
        self.in_flight = set()

    def give_up(self) -> None:
        """End the snapshot, whether keys are left to save or not."""
        self._table = None
        self._keys, self._done, self._left = iter(()), set(), set()

    # ------------------------------------------------------------ moving

    def leave(self, keys: Sequence[Any]) -> list[Any]:
        """Prepare for keys that are about to leave; return those that count as changed at their new owner."""
        self._note_all()
        self.preserve(keys)
        if not self.changed and not self.in_flight:
            return []
        changed = [key for key in keys if key in self.changed or key in self.in_flight]
        self.changed.difference_update(keys)
        self.in_flight.difference_update(keys)
        return changed

    def arrive(self, keys: Collection[Any]) -> None:
        """Prepare for keys that are about to be added: a snapshot under way has them as absent."""
        self._note_all()
        self.preserve(keys)

    def deleted(self) -> list[Any]:
        """Return the changed keys without state: no other worker will report them as deleted."""
        with KeyCalls(self.operator.step):
            keys = [*{*self.changed, *self.in_flight}]
            self.operator.fetch_missing(keys)
            return [key for key in keys if key not in self.operator.states]
