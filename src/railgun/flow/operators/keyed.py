"""Keyed state: what every stateful operator has, and how it moves.

State lives in a plain dict from key to state. The protocol knows keys by their hashes, so a table from hash to key is
made when a rescale asks for it, block by block (`census`), of the keys that move only, and given up with them. It is in
shards by the first bits of the hash: a large dict stops everything when it grows, and keys leave in the order of their
hashes, so the shard they leave from is in the processor's cache.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import is_
from typing import Any, Final

from railgun.core.frontier import MIN
from railgun.core.hashing import Hashes
from railgun.flow.operators.operator import Operator, Setting
from railgun.flow.operators.timers import Timers
from railgun.wire.columns import DecodingError, decode_column, encode_column
from railgun.wire.pickling import dumps

BLOCK: Final = 2_048
SHARD_BITS: Final = 8
_SHIFT: Final = 64 - SHARD_BITS
_NONE: Final = object()
_HEAD: Final = struct.Struct("<III")  # rows, length of the keys, length of the states


class Keyed(Operator):
    """An operator with one state for each key."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.states: dict[Any, Any] = {}
        self.timers = Timers()
        self.ended: set[Any] = set()
        self.index: list[dict[int, Any]] = []
        self.shared: dict[int, list[Any]] = {}  # further keys of hashes that more than one key has

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

    def note(self, hashes: Hashes, keys: Sequence[Any]) -> None:
        """Remember which keys these hashes stand for."""
        if not self.index:
            self.index = [{} for _ in range(1 << SHARD_BITS)]
        index = self.index
        for number, key in zip(hashes.tolist(), keys, strict=True):
            if index[number >> _SHIFT].setdefault(number, key) != key:
                others = self.shared.setdefault(number, [])
                if key not in others:
                    others.append(key)

    def forget_index(self) -> None:
        """The rescale is over."""
        self.index = []
        self.shared = {}

    def keys_of(self, hashes: Hashes) -> list[Any]:
        """The keys that have these hashes; they leave the index."""
        numbers = hashes.tolist()
        if not self.index:
            return []
        index = self.index
        keys = [index[number >> _SHIFT].pop(number, _NONE) for number in numbers]
        if any(map(is_, keys, repeat(_NONE))):
            keys = [key for key in keys if key is not _NONE]
        if self.shared:
            for number in numbers:
                keys += self.shared.pop(number, [])
        return keys

    def collect(self, keys: list[Any]) -> bytes:
        """Take the state of those of these keys that have any out, as bytes."""
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
        extra = dumps((timers, ended)) if timers or ended else b""
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
        self.states.update(zip(keys, states, strict=True))
        extra = data[at + saved :]
        if extra:
            timers, ended = pickle.loads(extra)
            self.timers.enter(timers)
            self.ended.update(ended)
        return keys

    def packed(self, key: Any, state: Any) -> Any:
        """The state as it travels."""
        return state

    def unpacked(self, key: Any, state: Any) -> Any:
        """The state as it lives here."""
        return state
