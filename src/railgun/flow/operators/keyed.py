"""Keyed state: what every stateful operator has, and how it moves.

State lives in a plain dict from key to state. The protocol knows keys by their hashes, so an index from hash to key is
made when a rescale asks for it, block by block (`census`), of the keys that move only.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import is_
from typing import Any, Final, Protocol

import numpy as np

from railgun.core.frontier import MIN
from railgun.core.hashing import Hashes
from railgun.flow.operators.changes import Changes
from railgun.flow.operators.operator import Operator, Setting
from railgun.flow.operators.timers import Timers
from railgun.wire.columns import DecodingError, decode_column, encode_column
from railgun.wire.pickling import dumps

BLOCK: Final = 2_048
SHARD_BITS: Final = 6
_NONE: Final = object()
_HEAD: Final = struct.Struct("<III")  # rows, length of the keys, length of the states


class Rows(Protocol):
    """Saved rows of one operator."""

    @property
    def version(self) -> int:
        """Of the form the states have."""

    @property
    def keys(self) -> list[Any]:
        """The keys."""

    @property
    def states(self) -> list[Any]:
        """Their states."""

    @property
    def timers(self) -> list[list[Any]]:
        """Their timers."""

    @property
    def ended(self) -> list[bool]:
        """Whether they have ended."""


class Index:
    """Which keys the hashes of keys in motion stand for.

    The keys found are put in shards by the first bits of the hash, and a shard is sorted when its first key leaves:
    nothing grows and nothing is sorted as a whole, for which records would have to wait.
    """

    __slots__ = ("_late", "_shards")

    def __init__(self) -> None:
        self._shards: dict[int, list[tuple[Hashes, list[Any]]]] = {}
        self._late: dict[int, dict[Any, None]] = {}

    def __len__(self) -> int:
        return len(self._shards) + len(self._late)

    def note(self, hashes: Hashes, keys: list[Any]) -> None:
        """These keys were found; they have these hashes."""
        order = np.argsort(hashes)
        hashes = hashes[order]
        keys = [keys[row] for row in order.tolist()]
        shards = (hashes >> np.uint64(64 - SHARD_BITS)).astype(np.intp)
        starts = np.flatnonzero(np.diff(shards, prepend=-1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(keys)], strict=True):
            found = hashes[start:end], keys[start:end]
            self._shards.setdefault(int(shards[start]), []).append(found)

    def note_late(self, hashes: Hashes, keys: Sequence[Any]) -> None:
        """These keys came after all were counted, or while they were."""
        for number, key in zip(hashes.tolist(), keys, strict=True):
            self._late.setdefault(number, {})[key] = None

    def pop(self, hashes: Hashes) -> list[Any]:
        """The keys that have these hashes, which ascend."""
        keys: list[Any] = []
        shards = hashes >> np.uint64(64 - SHARD_BITS)
        at = 0
        while at < len(hashes):
            shard = int(shards[at])
            end = int(np.searchsorted(shards, shards[at], side="right"))
            noted, names = self._sort(shard)
            first = np.searchsorted(noted, hashes[at:end], side="left")
            last = np.searchsorted(noted, hashes[at:end], side="right")
            if bool((last - first == 1).all()):
                keys += map(names.__getitem__, first.tolist())
            else:  # some hash is of several keys, or of none that was counted
                spans = zip(first.tolist(), last.tolist(), strict=True)
                keys += chain.from_iterable(names[begin:stop] for begin, stop in spans)
            at = end
        if self._late:
            for number in hashes.tolist():
                keys += self._late.get(number, ())
            keys = list(dict.fromkeys(keys))
        return keys

    def _sort(self, shard: int) -> tuple[Hashes, list[Any]]:
        found = self._shards.get(shard, [])
        if len(found) != 1:
            hashes = np.concatenate([np.empty(0, dtype=np.uint64), *(some for some, _ in found)])
            keys = list(chain.from_iterable(keys for _, keys in found))
            order = np.argsort(hashes)
            found = self._shards[shard] = [(hashes[order], [keys[row] for row in order.tolist()])]
        return found[0]


class Keyed(Operator):
    """An operator with one state for each key."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.states: dict[Any, Any] = {}
        self.timers = Timers()
        self.ended: set[Any] = set()
        self.changes: Changes | None = None  # if snapshots are taken
        self.index = Index()

    # ------------------------------------------------------------ snapshots

    def watch_changes(self) -> None:
        """From now on, keep account of what changes."""
        self.changes = Changes(self)
        self.timers.touch = self.changes.touch

    def touch(self, keys: Collection[Any]) -> None:
        """The state of these keys is about to change."""
        if self.changes is not None:
            self.changes.touch(keys)

    def saved(self, keys: list[Any], states: list[Any]) -> list[Any]:
        """The states as they are saved; None for a key that has none."""
        return states

    def unload(self, keys: Iterable[Any]) -> None:
        """Take out keys that a snapshot says are deleted."""
        for key in keys:
            self.states.pop(key, None)
            self.timers.forget(key)
            self.ended.discard(key)

    def load(self, rows: Rows) -> None:
        """Put saved rows in; those of an older snapshot come first. `loaded` is called when all are in."""
        keys, states = rows.keys, rows.states
        for upgrade in self.setting.upgrades[rows.version - 1 :]:
            states = list(map(upgrade, states))
        self.states.update(zip(keys, states, strict=True))
        if self.timers:
            for key in keys:
                self.timers.forget(key)
        if any(rows.timers):
            self.timers.enter({k: t for k, t in zip(keys, rows.timers, strict=True) if t})
        self.ended.difference_update(keys)
        self.ended.update(compress(keys, rows.ended))

    def loaded(self) -> None:
        """All that was saved is in: let it live."""
        if type(self).unpacked is not Keyed.unpacked:
            for key, state in list(self.states.items()):
                self.states[key] = self.unpacked(key, state)

    # ------------------------------------------------------------ time

    def advance(self, frontier: int) -> None:
        """Time has come so far: fire what is due."""

    def advance_keys(self, keys: Sequence[Any], frontier: int, latest: int = MIN) -> None:
        """Time has come so far for these keys, which are about to leave; `MAX`: they end before, as in `end`."""

    def end(self, latest: int = MIN) -> None:
        """Nothing comes any more: end every key that has not ended yet, at a time not before `latest`."""

    # ------------------------------------------------------------ moving

    def census(self) -> Iterator[list[Any]]:
        """All keys that have state now, in blocks."""
        keys = list(self.states)
        return (keys[at : at + BLOCK] for at in range(0, len(keys), BLOCK))

    def collect(self, keys: list[Any]) -> bytes:
        """Take the state of those of these keys that have any out, as bytes."""
        changed = [] if self.changes is None else self.changes.leave(keys)
        states = [self.states.pop(key, _NONE) for key in keys]
        if any(map(is_, states, repeat(_NONE))):
            keys = [key for key, state in zip(keys, states, strict=True) if state is not _NONE]
            states = [state for state in states if state is not _NONE]
        if type(self).packed is not Keyed.packed:
            states = list(map(self.packed, keys, states))
        timers = self.timers.leave(keys)
        ended = [key for key in keys if key in self.ended] if self.ended else []
        self.ended.difference_update(ended)
        names, saved = encode_column(keys), encode_column(states)
        extra = dumps((timers, ended, changed)) if timers or ended or changed else b""
        return b"".join((_HEAD.pack(len(keys), len(names), len(saved)), names, saved, extra))

    def take(self, data: memoryview) -> list[Any]:
        """Put state from another worker in; the keys it is of."""
        try:
            rows, named, saved = _HEAD.unpack_from(data)
        except struct.error as error:
            raise DecodingError(f"the state of keys cannot be read: {error}") from error
        at = _HEAD.size
        keys = decode_column(data[at : at + named], rows)
        at += named
        states = decode_column(data[at : at + saved], rows)
        if type(self).unpacked is not Keyed.unpacked:
            states = list(map(self.unpacked, keys, states))
        if self.changes is not None:
            self.changes.preserve(keys)  # a snapshot cut here has them from where they come
        self.states.update(zip(keys, states, strict=True))
        extra = data[at + saved :]
        if extra:
            timers, ended, changed = pickle.loads(extra)
            self.timers.enter(timers)
            self.ended.update(ended)
            self.touch(changed)
        return keys

    def packed(self, key: Any, state: Any) -> Any:
        """The state as it travels."""
        return state

    def unpacked(self, key: Any, state: Any) -> Any:
        """The state as it lives here."""
        return state
