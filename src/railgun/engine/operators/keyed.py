"""Hold the keyed state of an operator, save it, and move it.

State lives in a `KeyStore`, which operators use as a plain dict from key to state. The protocol knows keys by their
hashes. So when a rescale asks for the keys that move, they are noted block by block (`census`), in the order of the
dict, and leave in this order: each lies in memory beside the one before it.
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
from railgun.engine.operators.operator import Operator, Setting, describe_error, name_of, shorten
from railgun.engine.operators.sharing import ResultChecks
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

BLOCK_KEYS: Final = 2_048
SAMPLED_KEYS: Final = 100  # keys of a saved file whose types are compared with those of records
_NONE: Final = object()
_HEAD: Final = struct.Struct("<III")  # rows, length of the keys, length of the states


class LeavingKeys:
    """The keys of a stage that leave, in the order in which they were found.

    A hash is named to the protocol once. Further keys of the same hash, and keys that come late, are few: they are kept
    by their hashes, and leave with them.
    """

    __slots__ = ("_keys", "_more", "_named", "found_hashes")

    def __init__(self) -> None:
        self.found_hashes: list[Hashes] = []  # hashes of the keys found, until they are named
        self._named: Hashes = np.empty(0, dtype=np.uint64)
        self._keys: list[Any] = []
        self._more: dict[int, dict[Any, None]] = {}

    def __len__(self) -> int:
        return len(self._keys) + len(self._more)

    def note(self, hashes: Hashes, keys: list[Any]) -> None:
        """Add keys that were found, with their hashes."""
        self.found_hashes.append(hashes)
        self._keys += keys

    def note_late(self, hashes: Hashes, keys: Sequence[Any]) -> None:
        """Add keys that came while the others were being found, or after."""
        for number, key in zip(hashes.tolist(), keys, strict=True):
            self._more.setdefault(number, {})[key] = None

    def name(self, order: Order) -> None:
        """Fix the order of leaving, `Order.of(found_hashes)`: all keys are found."""
        if len(order) < len(self._keys):
            self._set_aside(order)
        self.found_hashes, self._named = [], order.hashes

    def _set_aside(self, order: Order) -> None:
        """Move all but the first of several keys with one hash to the keys kept by hash."""
        hashes = np.concatenate(self.found_hashes)
        stays = np.zeros(len(hashes), dtype=bool)
        stays[np.unique(order.find(hashes), return_index=True)[1]] = True
        for row in np.flatnonzero(~stays).tolist():
            self._more.setdefault(int(hashes[row]), {})[self._keys[row]] = None
        self._keys = list(compress(self._keys, stays.tolist()))

    def pop(self, hashes: Hashes, turns: Turns) -> list[Any]:
        """Remove and return the keys with these hashes, given their ascending turns."""
        rows = turns[turns < len(self._named)]  # the others were not named
        if bool((self._named[rows] != hashes[: len(rows)]).any()):
            raise ProtocolError("keys are to leave in an order they were not named in")
        # Drop references to the keys that have left now: in the end all would be freed at once.
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
        # The states of keys that were fetched: `KeyStore` says when to fetch.
        self.states = self.store.states
        self.timers = Timers()
        self.ended: set[Any] = set()
        self.changes: Changes | None = None  # if snapshots are taken
        self.loaded_keys: list[Any] = []  # a sample of the keys in the snapshot
        self.sharing = ResultChecks()
        self._tried: set[type] = set()  # types of which a state was pickled and unpickled

    # ------------------------------------------------------------ results and state

    def taking(self, results: list[Any]) -> Callable[[Any], None]:
        """Return the function that appends a result to `results`; in strict mode, it also notes the result."""
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
        """Check the state and the result of a batch's last call; in strict mode, check all results."""
        check_result(self.step, function, last, self.not_results)
        check_state(self.step, function, keys[-1], state, self.not_results)
        sharing = self.sharing
        if sharing.strict:
            sharing.compare(self.step, function, keys, results)
            results[:] = map(own_copy, results)

    # ------------------------------------------------------------ snapshots

    def watch_changes(self) -> None:
        """Record the keys that change from now on."""
        self.changes = Changes(self)
        self.timers.touch = self.changes.touch

    def touch(self, keys: Collection[Any], records: Sequence[Any] = ()) -> None:
        """Announce that the state of these keys is about to change, by these records, if any."""
        if self.changes is not None:
            self.changes.touch(keys, records)

    def fetch(self, keys: Sequence[Any]) -> None:
        """Bring these keys into memory: their states are about to be used."""
        if not isinstance(self.store, MemoryStore):
            with KeyCalls(self.step, keys):
                self.store.fetch(keys)

    def fetch_missing(self, keys: Collection[Any]) -> None:
        """Bring missing ones of these keys into memory; if none is missing, other fetched keys stay there."""
        if self.store.spilled:
            missing = [key for key in keys if key not in self.states]
            if missing:
                self.store.fetch(missing)

    def saved(self, keys: list[Any], states: list[Any]) -> list[Any]:
        """Return the states in their saved form; None for a key without state."""
        return states

    def unload(self, keys: Iterable[Any]) -> None:
        """Remove keys that a snapshot records as deleted."""
        for block in blocks(list(keys), BLOCK_KEYS):
            with KeyCalls(self.step, block):
                self.store.fetch(block)
                for key in block:
                    self.states.pop(key, None)
                    self.timers.forget(key)
                    self.ended.discard(key)

    def load(self, rows: Rows) -> None:
        """Add saved rows; those of an older snapshot come first. `loaded` is called after the last."""
        keys, states = rows.keys, rows.states
        self.loaded_keys += keys[:SAMPLED_KEYS]
        self.loaded_keys += dict(
            zip(map(type, keys), keys, strict=True)
        ).values()  # one of each type
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
        upgraded: list[Any] = []
        with ValueCalls(self.step, upgrade, "key", keys, upgraded.__len__) as call:
            called = call.following(upgrade)
            try:
                for state in states:
                    upgraded.append(called(state))
            except BaseException as error:
                pass_interrupt(error)
                row = len(upgraded)
                raise UpgradeError(
                    self.step,
                    name_of(upgrade),
                    shorten(keys[row]),
                    shorten(states[row]),
                    describe_error(error),
                ) from error
        return upgraded

    def _put(self, keys: list[Any], states: list[Any]) -> None:
        """Store the states, replacing those of older rows."""
        if len(self.store) and not isinstance(self.store, MemoryStore):
            for block in blocks(keys, BLOCK_KEYS):
                self.store.fetch(block)
                for key in block:
                    self.states.pop(key, None)
        self.store.put(keys, states)

    def loaded(self) -> None:
        """Finish loading: bring saved states into their live form."""
        if type(self).unpacked is not Keyed.unpacked:
            for key, state in list(self.states.items()):
                self.states[key] = self.unpacked(key, state)

    # ------------------------------------------------------------ time

    def reached(self, anywhere: bool = False) -> int:
        """Return the frontier as announced to records and timers of this step; `MIN`: none was announced.

        `anywhere`: for any key, also if it was announced on another worker.
        """
        return MIN

    def restore(self, frontier: int) -> None:
        """Raise the frontier of every key to the one of a snapshot, before the first record."""

    def restore_keys(self, keys: Collection[Any], frontier: int) -> None:
        """Raise the frontier of these keys to the one they saw on the worker they came from."""

    def advance(self, frontier: int) -> None:
        """Take a new frontier: fire the timers that are due."""

    def advance_keys(self, keys: Sequence[Any], frontier: int, latest: int = MIN) -> None:
        """Take a new frontier for keys that are about to leave; at `MAX` they end first, as in `end`."""

    def end(self, latest: int = MIN) -> None:
        """End the stream: fire the remaining timers, and end every key that has not ended yet."""
        self.fire_left()
        self.end_keys(latest)

    def fire_left(self) -> None:
        """Fire every timer that is set now: time has ended."""

    def end_keys(self, latest: int = MIN) -> None:
        """End every key that has not ended yet, at a time not before `latest`."""

    # ------------------------------------------------------------ moving

    def census(self) -> Iterator[list[Any]]:
        """Yield all keys that have state now, in blocks."""
        return self.store.census(BLOCK_KEYS)

    def collect(self, keys: list[Any]) -> bytes:
        """Remove the state of those of these keys that have any, and return it as bytes."""
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

        Raise `UnpicklableStateError` for the first that pickle refuses, `UnloadableStateError` for one that cannot be
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
                details = self._state_error_details(key, state, error)
                raise UnpicklableStateError(*details) from error
            self._check_loads([key], [state])

    def _check_loads(self, keys: Sequence[Any], states: Sequence[Any]) -> None:
        unloadable = find_unloadable(states, self._tried)
        if unloadable is not None:
            row, error = unloadable
            details = self._state_error_details(keys[row], states[row], error)
            raise UnloadableStateError(*details) from error

    def _state_error_details(
        self, key: Any, state: Any, error: BaseException
    ) -> tuple[str, str, str, str, str]:
        kind = type(state).__qualname__
        return self.step, "", shorten(key), kind, f"{type(error).__name__}: {error}"

    def take(self, data: memoryview) -> list[Any]:
        """Add state from another worker; return its keys."""
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
        """Return the state in the form that travels to another worker."""
        return state

    def unpacked(self, key: Any, state: Any) -> Any:
        """Return the state in the form that lives on this worker."""
        return state
