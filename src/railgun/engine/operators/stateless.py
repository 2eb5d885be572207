"""Steps without state: map, filter, flat_map, map_batches, inspect, branch, key_by, and the key as part of the item."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railgun.engine.operators.calls import RecordCalls, ValueCalls, begun_before
from railgun.engine.operators.functions import ASYNCHRONOUS, UNFINISHED, check_result
from railgun.engine.operators.operator import Operator, Setting, name_of, without_values
from railgun.errors import KeyCodeError, pass_interrupt
from railgun.hashing import Hashes, hash_keys, key_hash
from railgun.transport.rows import RowBatch, joined

KEYED_BATCH_ROWS: Final = 1_000  # rows that are keyed and sent at once


def without_rows(batch: RowBatch, failed: list[int]) -> RowBatch:
    """Return the batch without the rows that failed."""
    if not failed:
        return batch
    mask = np.ones(len(batch), dtype=bool)
    mask[failed] = False
    return batch.take(np.flatnonzero(mask))


class Map(Operator):
    """Maps each item to one item."""

    def __init__(self, setting: Setting, function: Callable[[Any], Any]) -> None:
        super().__init__(setting)
        self.function = function

    def push(self, batch: RowBatch) -> None:
        """Apply the function to every row."""
        results, failed = self.each(self.function, batch)
        self.emit(without_rows(batch, failed).with_values(results))


class Filter(Map):
    """Keeps the items for which the function returns a true value."""

    not_results = UNFINISHED

    def push(self, batch: RowBatch) -> None:
        """Emit the rows for which the function returns a true value."""
        left, flags = self.answers_for(batch)
        rows = np.fromiter(compress(range(len(flags)), flags), dtype=np.intp)
        self.emit(left if len(rows) == len(left) else left.take(rows))

    def answers_for(self, batch: RowBatch) -> tuple[RowBatch, list[bool]]:
        """Return the rows the function answered for, and its answers as bools (`bool` of an answer may raise)."""
        results, failed = self.each(self.function, batch)
        left = without_rows(batch, failed)
        answers, failed = self.each(bool, left, results, user=self.function)
        return without_rows(left, failed), answers


class FlatMap(Map):
    """Maps each item to any number of items."""

    def push(self, batch: RowBatch) -> None:
        """Apply the function to every row; emit the results of all rows, in order."""
        results, failed = self.each(self._listed, batch, user=self.function)
        left = without_rows(batch, failed)
        self.emit(spread_results(left, results))

    def _listed(self, item: Any) -> Sequence[Any]:
        returned = self.function(item)
        if type(returned) in ASYNCHRONOUS:
            check_result(self.step, self.function, returned, ASYNCHRONOUS)
        # A list is copied: the function may fill the same one again.
        return returned if type(returned) is tuple else list(returned)


class MapBatches(Operator):
    """Maps a list of items to a list of items, of any length if there are no keys."""

    def __init__(
        self, setting: Setting, function: Callable[[list[Any]], Iterable[Any]], keyed: bool
    ) -> None:
        super().__init__(setting)
        self.function = function
        self.keyed = keyed

    def push(self, batch: RowBatch) -> None:
        """Apply the function to all rows at once."""
        with RecordCalls(self, self.function, batch, at_once=True):
            try:
                returned = self.function(batch.values.copy())
                check_result(self.step, self.function, returned, ASYNCHRONOUS)
                results = list(returned)
                if self.keyed and len(results) != len(batch):
                    raise ValueError(
                        f"{len(batch)} keyed items went in, {len(results)} came out: which keys have these?"
                    )
            except BaseException as error:
                self.raised_for(self.function, None, batch.values, _latest(batch), error)
                return
        if len(results) == len(batch):
            self.emit(batch.with_values(results))
        else:
            # All results stand for all records: they have the latest time, and follow the last record.
            latest = 0 if isinstance(batch.times, int) else int(batch.times.argmax())
            origin = late = None
            if batch.origin is not None:
                origin = tuple(np.full(len(results), column[-1]) for column in batch.origin)
            if batch.late is not None:
                late = np.full(len(results), batch.late[latest])
            self.emit(RowBatch(results, _latest(batch), origin=origin, late=late))


def _latest(batch: RowBatch) -> int:
    return batch.times if isinstance(batch.times, int) else int(batch.times.max())


class Inspect(Map):
    """Calls a function for every item and passes the items on."""

    def push(self, batch: RowBatch) -> None:
        """Call the function for every row."""
        _, failed = self.each(self.function, batch)
        self.emit(without_rows(batch, failed))


class Branch(Filter):
    """Sends the items for which the function returns a true value one way, the others another."""

    def __init__(self, setting: Setting, function: Callable[[Any], Any]) -> None:
        super().__init__(setting, function)
        self.yes = Pass(setting)
        self.no = Pass(setting)

    def push(self, batch: RowBatch) -> None:
        """Split the rows by the function's answers."""
        left, answers = self.answers_for(batch)
        flags = np.array(answers, dtype=bool)
        if not len(left):
            return
        if self.parting is None:
            self._split(left, flags)
            return
        with self.parting.parting():
            self._split(left.numbered(), flags)

    def next_operators(self) -> list[Operator]:
        """Return the operators of the two branches."""
        return [self.yes, self.no]

    def _split(self, batch: RowBatch, flags: NDArray[np.bool_]) -> None:
        for way, mask in ((self.yes, flags), (self.no, ~flags)):
            if mask.all():
                way.emit(batch)
            elif mask.any():
                way.emit(batch.take(np.flatnonzero(mask)))


class Pass(Operator):
    """Passes all items on: where streams come together, and where a port begins."""

    def push(self, batch: RowBatch) -> None:
        """Pass the batch on."""
        self.emit(batch)


class WithKey(Operator):
    """Makes the key part of the item."""

    def push(self, batch: RowBatch) -> None:
        """Pair keys and items."""
        assert batch.keys is not None
        self.emit(batch.with_values(list(zip(batch.keys, batch.values, strict=True))))


class KeyBy(Operator):
    """Gives every item a key, and hands it to the distributor of the stage that begins here."""

    not_results = UNFINISHED

    def __init__(
        self,
        setting: Setting,
        key: Callable[[Any], Any],
        value: Callable[[Any], Any] | None,
        port: int,
        deliver: Callable[[RowBatch], None],
    ) -> None:
        super().__init__(setting)
        self.key = key
        self.value = value
        self.port = port
        self.deliver = deliver
        self._hashing = f"__stable_key__ or __hash__ of keys of {name_of(key)}"
        self._waiting: list[tuple[list[Any], list[Any], RowBatch]] = []  # keys, values, their rows
        self._rows = 0

    def push(self, batch: RowBatch) -> None:
        """Key the rows. A few rows wait for `flush`: a hundred small batches cost as much as a large one."""
        keys, failed = self.each(self.key, batch)
        left = without_rows(batch, failed)
        values = left.values
        if self.value is not None:
            values, failed = self.each(self.value, left)
            if failed:
                keys = without_values(keys, failed)
                left = without_rows(left, failed)
        if keys:
            self._waiting.append((keys, values, left))
            self._rows += len(keys)
            if self._rows >= KEYED_BATCH_ROWS:
                self.flush()

    def flush(self) -> bool:
        """Deliver the waiting rows; return False if there were none."""
        waiting, self._waiting, self._rows = self._waiting, [], 0
        if not waiting:
            return False
        keys, values, left = waiting[0]
        if len(waiting) > 1:
            keys = [key for batch_keys, _, _ in waiting for key in batch_keys]
            values = [value for _, batch_values, _ in waiting for value in batch_values]
            left = joined([batch for _, _, batch in waiting])
        walked = iter(keys)
        done = begun_before(walked, len(keys))
        with ValueCalls(self.step, self._hashing, "record", left.values, done) as call:
            call.try_each(key_hash, keys)
            times, port, origin, late = left.times, self.port, left.origin, left.late
            try:
                hashes = hash_keys(keys, walked)
                batch = RowBatch(values, times, keys, hashes, port, origin, late)
            except BaseException as error:  # including errors of a user's `__stable_key__`
                pass_interrupt(error)
                former_keys = [
                    key
                    for _, _, rows_in in waiting
                    for key in rows_in.keys or [None] * len(rows_in)
                ]
                items = RowBatch(left.values, times, former_keys)
                rows, hashes = self._hashable(keys, items, call)
                no_hashes = np.zeros(len(keys), dtype=np.uint64)
                batch = RowBatch(values, times, keys, no_hashes, port, origin, late).take(rows)
                batch.hashes = hashes
        if len(batch):
            self.deliver(batch)
        return True

    def _hashable(
        self, keys: list[Any], items: RowBatch, call: ValueCalls
    ) -> tuple[NDArray[np.intp], Hashes]:
        """Return the rows whose keys have a stable hash, and the hashes; handle an error as one of the key function.

        `items` has the rows with the keys they had before this step.
        """
        tried: list[bool] = []  # whether the key has a hash
        hashes: list[int] = []
        call.done = tried.__len__
        for row, key in enumerate(keys):
            try:
                hashes.append(key_hash(key))
                tried.append(True)
            except KeyCodeError as error:
                self.raised(error.method, items, row, error.__cause__ or error)
                tried.append(False)
            except BaseException as error:
                self.raised(self.key, items, row, error)
                tried.append(False)
        return np.flatnonzero(tried), np.array(hashes, dtype=np.uint64)


def spread_results(batch: RowBatch, results: Sequence[Sequence[Any]]) -> RowBatch:
    """Return a batch of all results, each with the key and time of the row it came from."""
    counts = list(map(len, results))
    values = list(chain.from_iterable(results))
    columns = batch.keys, batch.origin, batch.late
    if isinstance(batch.times, int) and all(column is None for column in columns):
        return RowBatch(values, batch.times)
    rows = np.repeat(np.arange(len(counts)), np.array(counts, dtype=np.intp))
    times = batch.times if isinstance(batch.times, int) else batch.times[rows]
    origin = None if batch.origin is None else tuple(column[rows] for column in batch.origin)
    late = None if batch.late is None else batch.late[rows]
    if batch.keys is None:
        return RowBatch(values, times, origin=origin, late=late)
    keys = list(chain.from_iterable(map(repeat, batch.keys, counts)))
    return RowBatch(values, times, keys, batch.hashes[rows], batch.port, origin, late)
