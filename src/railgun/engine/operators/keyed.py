"""Keyed state: what every stateful operator has, and how it moves.

State lives in a `KeyStore`, of which operators see a plain dict from key to state. The protocol knows keys by their
hashes. So when a rescale asks, the keys that move are noted, block by block (`census`), in the order of the dict, and
in this order they leave: each lies in memory beside the one before it.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import is_
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from railgun.engine.operators.calls import PICKLE, UNPICKLE, Call, KeyCalls, ValueCalls
from railgun.engine.operators.changes import Changes
from railgun.engine.operators.copying import own_copy
from railgun.engine.operators.functions import UNFINISHED, check_result, check_state
from railgun.engine.operators.operator import Operator, Setting, name_of, shorten, tell
from railgun.engine.operators.sharing import Sharing
from railgun.engine.operators.timers import Timers
from railgun.engine.protocol.frontier import MIN
from railgun.engine.protocol.rescale.order import Order, Turns
from railgun.engine.state.store import MemoryStore, blocks
from railgun.errors import ProtocolError, pass_interrupt
from railgun.flows.errors import (
    UnloadableRecordError,
    UnloadableStateError,
    UnpicklableStateError,
    UpgradeError,
)
from railgun.hashing import Hashes
from railgun.transport.columns import (
    CannotUnpickleError,
    DecodingError,
    EncodingError,
    decode_column,
    encode_column,
)
from railgun.transport.pickling import dumps, find_unloadable

if TYPE_CHECKING:
    from railgun.engine.snapshots.table import Rows

BLOCK: Final = 2_048
LOOKED_AT: Final = 100  # keys of a saved file whose types are compared with those of records
_NONE: Final = object()
_HEAD: Final = struct.Struct("<III")  # rows, length of the keys, length of the states


class Leaving:
    """The keys of a stage that leave, in the order in which they do, which is the one they are found in.

    A hash is named to the protocol once. Further keys of the same hash, and keys that come late, are few: they are kept
    by their hashes, and leave with them.
    """

    __slots__ = ("_keys", "_more", "_named", "found")

    def __init__(self) -> None:
        self.found: list[Hashes] = []  # those of the keys, until they are named
        self._named: Hashes = np.empty(0, dtype=np.uint64)
        self._keys: list[Any] = []
        self._more: dict[int, dict[Any, None]] = {}

    def __len__(self) -> int:
        return len(self._keys) + len(self._more)

    def note(self, hashes: Hashes, keys: list[Any]) -> None:
        """These keys were found; they have these hashes."""
        self.found.append(hashes)
        self._keys += keys

    def note_late(self, hashes: Hashes, keys: Sequence[Any]) -> None:
        """These keys came after all were found, or while they were."""
        for number, key in zip(hashes.tolist(), keys, strict=True):
            self._more.setdefault(number, {})[key] = None

    def name(self, order: Order) -> None:
        """All are found, and their hashes are named in this order, which is `Order.of(found)`."""
        if len(order) < len(self._keys):
            self._set_aside(order)
        self.found, self._named = [], order.hashes

    def _set_aside(self, order: Order) -> None:
        """Of several keys with one hash the first one stays where it is."""
        hashes = np.concatenate(self.found)
        stays = np.zeros(len(hashes), dtype=bool)
        stays[np.unique(order.find(hashes), return_index=True)[1]] = True
        for row in np.flatnonzero(~stays).tolist():
            self._more.setdefault(int(hashes[row]), {})[self._keys[row]] = None
        self._keys = list(compress(self._keys, stays.tolist()))

    def pop(self, hashes: Hashes, turns: Turns) -> list[Any]:
        """The keys that have these hashes, whose turns these are; they ascend."""
        rows = turns[turns < len(self._named)]  # the others were not named
        if bool((self._named[rows] != hashes[: len(rows)]).any()):
            raise ProtocolError("keys are to leave in an order they were not named in")
        # What has left is let go of here: in the end all would be freed at once.
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows):  # all for one new owner
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            keys = self._keys[span]
            self._keys[span] = [None] * len(keys)
        else:
            keys = [self._keys[row] for row in rows.tolist()]
            for row in rows.tolist():
                self._keys[row] = None
        if self._more:
            more = [number for number in hashes.tolist() if number in self._more]
            if more:
                keys += chain.from_iterable(map(self._more.pop, more))
                keys = list(dict.fromkeys(keys))
        return keys


class Keyed(Operator):
    """An operator with one state for each key."""

    not_results = UNFINISHED

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.store = setting.store(setting.step) if setting.store else MemoryStore()
        self.states = (
            self.store.states
        )  # of keys that were fetched: see `KeyStore` for when that has to be
        self.timers = Timers()
        self.ended: set[Any] = set()
        self.changes: Changes | None = None  # if snapshots are taken
        self.loaded_keys: list[Any] = []  # some of those that were in the snapshot
        self.sharing = Sharing()
        self._tried: set[type] = set()  # types of which a state was pickled and unpickled

    # ------------------------------------------------------------ results and state

    def taking(self, results: list[Any]) -> Callable[[Any], None]:
        """Return the function that takes a result to `results`; where they are checked, one that remembers it."""
        if not self.sharing.strict:
            return results.append

        def take(result: Any) -> None:
            results.append(result)
            self.sharing.note(result)

        return take

    def check_results(
        self,
        function: Callable[..., Any],
        keys: Sequence[Any],
        results: list[Any],
        state: Any,
        last: Any,
    ) -> None:
        """Look at the state and the result of the last call of a batch, and at all results where these are checked."""
        check_result(self.step, function, last, self.not_results)
        check_state(self.step, function, keys[-1], state, self.not_results)
        sharing = self.sharing
        if sharing.strict:
            sharing.compare(self.step, function, keys, results)
            results[:] = map(own_copy, results)

    # ------------------------------------------------------------ snapshots

    def watch_changes(self) -> None:
        """From now on, keep account of what changes."""
        self.changes = Changes(self)
        self.timers.touch = self.changes.touch

    def touch(self, keys: Collection[Any], records: Sequence[Any] = ()) -> None:
        """The state of these keys is about to change, by these records if there are any."""
        if self.changes is not None:
            self.changes.touch(keys, records)

    def fetch(self, keys: Sequence[Any]) -> None:
        """Bring these keys into memory, as their states are about to be asked for."""
        if not isinstance(self.store, MemoryStore):
            with KeyCalls(self.step, keys):
                self.store.fetch(keys)

    def fetch_missing(self, keys: Collection[Any]) -> None:
        """Bring these keys into memory; if they are, whatever else was fetched stays there."""
        if self.store.spilled:
            missing = [key for key in keys if key not in self.states]
            if missing:
                self.store.fetch(missing)

    def saved(self, keys: list[Any], states: list[Any]) -> list[Any]:
        """The states as they are saved; None for a key that has none."""
        return states

    def unload(self, keys: Iterable[Any]) -> None:
        """Take out keys that a snapshot says are deleted."""
        for block in blocks(list(keys), BLOCK):
            with KeyCalls(self.step, block):
                self.store.fetch(block)
                for key in block:
                    self.states.pop(key, None)
                    self.timers.forget(key)
                    self.ended.discard(key)

    def load(self, rows: Rows) -> None:
        """Put saved rows in; those of an older snapshot come first. `loaded` is called when all are in."""
        keys, states = rows.keys, rows.states
        self.loaded_keys += keys[:LOOKED_AT]
        self.loaded_keys += dict(zip(map(type, keys), keys, strict=True)).values()  # one of each
        for upgrade in self.setting.upgrades[rows.version - 1 :]:
            states = self._upgraded(upgrade, keys, states)
        with KeyCalls(self.step, keys) as looking:
            looking.try_keys(self.states)
            self._put(keys, states)
            if self.timers:
                for key in keys:
                    self.timers.forget(key)
            if any(rows.timers):
                self.timers.enter({k: t for k, t in zip(keys, rows.timers, strict=True) if t})
            self.ended.difference_update(keys)
            self.ended.update(compress(keys, rows.ended))

    def _upgraded(
        self, upgrade: Callable[[Any], Any], keys: list[Any], states: list[Any]
    ) -> list[Any]:
        made: list[Any] = []
        with ValueCalls(self.step, upgrade, "key", keys, made.__len__) as call:
            called = call.following(upgrade)
            try:
                for state in states:
                    made.append(called(state))
            except BaseException as error:
                pass_interrupt(error)
                at = len(made)
                raise UpgradeError(
                    self.step, name_of(upgrade), shorten(keys[at]), shorten(states[at]), tell(error)
                ) from error
        return made

    def _put(self, keys: list[Any], states: list[Any]) -> None:
        """In place of what older rows said."""
        if len(self.store) and not isinstance(self.store, MemoryStore):
            for block in blocks(keys, BLOCK):
                self.store.fetch(block)
                for key in block:
                    self.states.pop(key, None)
        self.store.put(keys, states)

    def loaded(self) -> None:
        """All that was saved is in: let it live."""
        if type(self).unpacked is not Keyed.unpacked:
            for key, state in list(self.states.items()):
                self.states[key] = self.unpacked(key, state)

    # ------------------------------------------------------------ time

    def reached(self, anywhere: bool = False) -> int:
        """Return how far time has come, as records and timers of this step were told; `MIN`: nobody was told.

        `anywhere`: for any key, also if it was told so on another worker.
        """
        return MIN

    def restore(self, frontier: int) -> None:
        """Let time have come this far for every key, before the first record: a snapshot says so."""

    def restore_keys(self, keys: Collection[Any], frontier: int) -> None:
        """Let time have come this far for these keys, which have come from a worker that was told so."""

    def advance(self, frontier: int) -> None:
        """Time has come so far: fire what is due."""

    def advance_keys(self, keys: Sequence[Any], frontier: int, latest: int = MIN) -> None:
        """Time has come so far for these keys, which are about to leave; `MAX`: they end before, as in `end`."""

    def end(self, latest: int = MIN) -> None:
        """Nothing comes any more: fire the timers that are left, and end every key that has not ended yet."""
        self.fire_left()
        self.end_keys(latest)

    def fire_left(self) -> None:
        """Time has come to its end: fire every timer that is set now."""

    def end_keys(self, latest: int = MIN) -> None:
        """End every key that has not ended yet, at a time not before `latest`."""

    # ------------------------------------------------------------ moving

    def census(self) -> Iterator[list[Any]]:
        """All keys that have state now, in blocks."""
        return self.store.census(BLOCK)

    def collect(self, keys: list[Any]) -> bytes:
        """Take the state of those of these keys that have any out, as bytes."""
        with KeyCalls(self.step, keys) as looking:
            looking.try_keys(self.states)
            changed = [] if self.changes is None else self.changes.leave(keys)
            self.store.fetch(keys)
            states = [self.states.pop(key, _NONE) for key in keys]
            if any(map(is_, states, repeat(_NONE))):
                keys = [key for key, state in zip(keys, states, strict=True) if state is not _NONE]
                states = [state for state in states if state is not _NONE]
            if type(self).packed is not Keyed.packed:
                states = list(map(self.packed, keys, states))
            timers = self.timers.leave(keys)
            ended = [key for key in keys if key in self.ended] if self.ended else []
            self.ended.difference_update(ended)
        with ValueCalls(self.step, PICKLE, "key", keys, owners=states) as call:
            call.try_each(dumps, states)
            call.try_each(dumps, keys)
            names, saved = encode_column(keys), self._encoded(keys, states)
            extra = dumps((timers, ended, changed)) if timers or ended or changed else b""
        return b"".join((_HEAD.pack(len(keys), len(names), len(saved)), names, saved, extra))

    def _encoded(self, keys: list[Any], states: list[Any]) -> bytes:
        """Encode the states of these keys.

        Raises `UnpicklableStateError` for the first that pickle refuses, `UnloadableStateError` for one that cannot be
        unpickled; one of each type is tried.
        """
        try:
            encoded = encode_column(states)
        except EncodingError:
            for key, state in zip(keys, states, strict=True):
                self.check_state(key, state)
            raise
        self._check_loads(keys, states)
        return encoded

    def check_state(self, key: Any, state: Any) -> None:
        """Raise `UnpicklableStateError` if pickle refuses a state, `UnloadableStateError` if it cannot be unpickled."""
        with ValueCalls(self.step, PICKLE, "key", [key]):
            try:
                dumps(state)
            except BaseException as error:
                pass_interrupt(error)
                told = self._told_of_state(key, state, error)
                raise UnpicklableStateError(*told) from error
            self._check_loads([key], [state])

    def _check_loads(self, keys: Sequence[Any], states: Sequence[Any]) -> None:
        found = find_unloadable(states, self._tried)
        if found is not None:
            at, error = found
            told = self._told_of_state(keys[at], states[at], error)
            raise UnloadableStateError(*told) from error

    def _told_of_state(
        self, key: Any, state: Any, error: BaseException
    ) -> tuple[str, str, str, str, str]:
        kind = type(state).__qualname__
        return self.step, "", shorten(key), kind, f"{type(error).__name__}: {error}"

    def take(self, data: memoryview) -> list[Any]:
        """Put state from another worker in; the keys it is of."""
        try:
            rows, named, saved = _HEAD.unpack_from(data)
        except struct.error as error:
            raise DecodingError(f"the state of keys cannot be read: {error}") from error
        at = _HEAD.size
        with Call(self.step, UNPICKLE):
            try:
                keys = decode_column(data[at : at + named], rows)
                at += named
                states = decode_column(data[at : at + saved], rows)
            except CannotUnpickleError as error:
                raise UnloadableRecordError(self.step, "", "", "", str(error)) from error
        if type(self).unpacked is not Keyed.unpacked:
            states = list(map(self.unpacked, keys, states))
        with KeyCalls(self.step, keys) as looking:
            looking.try_keys(self.states)
            if self.changes is not None:
                self.changes.arrive(keys)
            self.store.put(keys, states)
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
