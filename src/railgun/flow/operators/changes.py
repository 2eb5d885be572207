"""Changes: which keys of an operator changed since the last snapshot, and how the next one saves them.

A snapshot is of one moment, its cut, and must not stop the flow however much there is to save. So at the cut only the
set of keys to save is put aside. They are encoded in pieces (`step`) while records flow, and a key that is about to
change, or to leave, is encoded just before (`touch`, `preserve`). Rules:

1. Whoever changes the state of keys says so first: `touch`.
2. A *full* snapshot saves every key there is at the cut. Otherwise it saves those that changed since the last one that
   was committed; a key that has no state any more is saved as deleted.
3. What a snapshot was to save counts as changed again if it is not committed.
4. A key takes along that it changed when it moves; and that it is part of a snapshot not settled yet, which is the
   same to its new owner.
5. A key that comes after the cut was saved where it came from. So before it is put in it is preserved as what it was
   here at the cut: not there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, compress, islice
from operator import not_
from typing import TYPE_CHECKING, Any, Final

from railgun.core.hashing import hash_keys
from railgun.flow.calls import Call

if TYPE_CHECKING:
    from railgun.flow.operators.keyed import Keyed
    from railgun.snapshots.table import TableWriter

BLOCK: Final = 500
_NONE: Final = object()


class Changes:
    """The changes of one operator."""

    __slots__ = ("_done", "_full", "_keys", "_table", "changed", "flying", "operator")

    def __init__(self, operator: Keyed) -> None:
        self.operator = operator
        self.changed: set[Any] = set()
        self.flying: set[Any] = set()  # that had changed when the snapshot not settled yet was cut
        self._table: TableWriter | None = None
        self._full = False
        self._keys: Iterator[Any] = iter(())
        self._done: set[Any] = set()

    def touch(self, keys: Collection[Any]) -> None:
        """These keys are about to change."""
        self.changed.update(keys)
        if self._table is not None:
            self.preserve(keys)

    # ------------------------------------------------------------ a snapshot

    def cut(self, table: TableWriter, full: bool) -> None:
        """This is the moment the snapshot is of."""
        self.flying |= self.changed
        self.changed = set()
        self._table, self._full, self._done = table, full, set()
        if full:
            self._keys = chain.from_iterable(self.operator.store.census())
        else:
            self._keys = iter(list(self.flying))

    @property
    def saving(self) -> bool:
        """Whether keys are left to save."""
        return self._table is not None

    def step(self) -> None:
        """Save a block of keys."""
        block = list(islice(self._keys, BLOCK))
        if block:
            self.preserve(block)
        else:
            self.give_up()

    def preserve(self, keys: Collection[Any]) -> None:
        """Save those of these keys that are part of the snapshot and not saved yet, as they are."""
        if self._table is None:
            return
        fresh = set(keys).difference(self._done)
        if not self._full:
            fresh &= self.flying
        if fresh:
            self._done |= fresh
            self._save(list(fresh))

    def _save(self, keys: list[Any]) -> None:
        operator, table = self.operator, self._table
        assert table is not None
        operator.fetch_missing(keys)
        get = operator.states.get
        states = [get(key, _NONE) for key in keys]
        gone = [state is _NONE for state in states]
        deleted = gone if any(gone) else None
        if deleted is not None:
            if self._full:  # made after the cut
                there = list(map(not_, gone))
                keys, states, deleted = (
                    list(compress(keys, there)),
                    list(compress(states, there)),
                    None,
                )
                if not keys:
                    return
            else:
                states = [None if state is _NONE else state for state in states]
        saved = operator.saved(keys, states)
        timers = operator.timers.of(keys) if operator.timers else None
        ended = [key in operator.ended for key in keys] if operator.ended else None
        with Call(operator.step, "pickle"):
            table.add(hash_keys(keys), keys, saved, timers, ended, deleted)

    def settle(self, committed: bool) -> None:
        """The snapshot counts from now on; or it does not, and what it was to save is still to be saved."""
        if not committed:
            self.changed |= self.flying
        self.flying = set()

    def give_up(self) -> None:
        """Nothing is left to be saved, or what is left is not to be."""
        self._table = None
        self._keys, self._done = iter(()), set()

    # ------------------------------------------------------------ moving

    def leave(self, keys: Sequence[Any]) -> list[Any]:
        """These keys are about to leave; those of them that count as changed where they go."""
        self.preserve(keys)
        if not self.changed and not self.flying:
            return []
        changed = [key for key in keys if key in self.changed or key in self.flying]
        self.changed.difference_update(keys)
        self.flying.difference_update(keys)
        return changed

    def deleted(self) -> list[Any]:
        """What changed and is no more: keys that nobody else will say of that they are deleted."""
        keys = [*{*self.changed, *self.flying}]
        self.operator.fetch_missing(keys)
        return [key for key in keys if key not in self.operator.states]
