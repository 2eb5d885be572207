"""Steps with state: stateful_map, reduce, and operators written as a class.

An operator written as a class sees every event: each item with its key, time and port, timers, the end of the stream.

>>> class Sessions(Stateful[str, int, list[int], tuple[str, int]]):
...     def initial(self):
...         return []
...     def on_item(self, item, context):
...         context.state.append(item)
...         context.set_timer(context.time + 10)
...         return ()
...     def on_timer(self, context):
...         yield context.key, sum(context.state)
...         context.forget()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final, Generic, TypeVar

import numpy as np

from railgun.engine.operators.calls import KeyCalls, RecordCalls, TimerCalls
from railgun.engine.operators.copying import ATOMS
from railgun.engine.operators.functions import ASYNCHRONOUS, check_pair, check_result, check_time
from railgun.engine.operators.keyed import Keyed
from railgun.engine.operators.operator import Setting
from railgun.engine.operators.sharing import copy_result
from railgun.engine.operators.stateless import spread_results, without_rows
from railgun.engine.protocol.frontier import LAST, MAX, MIN
from railgun.engine.state.store import blocks
from railgun.transport.rows import RowBatch

K = TypeVar("K")
T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")


class Forget:
    """The type of `FORGET`, which a function of `stateful_map` returns as the state to drop the key."""

    def __repr__(self) -> str:
        return "FORGET"

    def __reduce__(self) -> str:
        return "FORGET"


FORGET: Final = Forget()
_NONE_YET: Final = object()
_TIMER_BATCH_RESULTS: Final = 4096  # results of timers in one batch
TIMER_FETCH_KEYS: Final = 1_000  # keys to fetch at once for timers


class StatefulMap(Keyed):
    """Calls `function(state, item) -> (state, result)`, for one result per item."""

    def __init__(
        self,
        setting: Setting,
        function: Callable[[Any, Any], tuple[Any, Any]],
        initial: Callable[[], Any],
    ) -> None:
        super().__init__(setting)
        self.function = function
        self.initial = initial

    def push(self, batch: RowBatch) -> None:
        """Call the function for every row, with its key's state."""
        assert batch.keys is not None
        self.touch(batch.keys, batch.values)
        self.fetch(batch.keys)
        function, initial, states = self.function, self.initial, self.states
        get = states.get
        rows = zip(batch.keys, batch.values, strict=True)
        checked, step = self.sharing.strict, self.step
        state: Any = None
        with RecordCalls(self, function, batch, second=initial) as call:
            append = self.taking(call.results)
            called, initial = call.following(function), call.wrap_second(initial)
            while not call.over:
                try:
                    for key, value in rows:
                        state = get(key, _NONE_YET)
                        if state is _NONE_YET:
                            state = initial()
                        returned = called(state, value)
                        try:
                            state, result = returned
                        except (TypeError, ValueError):
                            state, result = check_pair(step, returned)
                        if type(result) not in ATOMS and not checked:
                            result = copy_result(state, result)
                        if state is FORGET:
                            states.pop(key, None)
                        else:
                            states[key] = state
                        append(result)
                except BaseException as error:
                    call.raised(error)
            left = without_rows(batch, call.failed_rows)
            if call.results:
                last = get(_keys(left)[-1])
                self.check_results(function, _keys(left), call.results, last, call.results[-1])
        self.emit(left.with_values(call.results))


class Reduce(Keyed):
    """Calls `function(so_far, item) -> so_far` and emits it after each item; a key's first item begins the fold."""

    def __init__(self, setting: Setting, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(setting)
        self.function = function

    def push(self, batch: RowBatch) -> None:
        """Fold every row into its key's value."""
        assert batch.keys is not None
        self.touch(batch.keys, batch.values)
        self.fetch(batch.keys)
        function, states = self.function, self.states
        rows = zip(batch.keys, batch.values, strict=True)
        before = states.get(batch.keys[-1])
        checked, plain = self.sharing.strict, int
        with RecordCalls(self, function, batch) as call:
            append = self.taking(call.results)
            called = call.following(function)
            while not call.over:
                try:
                    for key, value in rows:
                        try:
                            so_far = states[key]
                        except KeyError:
                            # The function may change its first argument; another step may share the first item.
                            if type(value) not in ATOMS and not checked:
                                value = copy_result(None, value)
                        else:
                            value = called(so_far, value)
                        if type(value) is plain:
                            states[key] = value
                            append(value)
                            continue
                        result = value
                        if type(value) in ATOMS:
                            plain = type(value)  # the next value usually has the same type
                        elif not checked:
                            result = copy_result(value, value)
                        states[key] = value
                        append(result)
                except BaseException as error:
                    call.raised(error)
            left = without_rows(batch, call.failed_rows)
            if call.results:
                self.check_results(function, _keys(left), call.results, before, call.results[-1])
        self.emit(left.with_values(call.results))


class Context(Generic[K, S]):
    """What a stateful operator knows about the current item or timer, and its means to set timers."""

    __slots__ = ("_operator", "_set", "frontier", "key", "port", "state", "time")

    def __init__(self, operator: StatefulSteps) -> None:
        self._operator = operator
        self._set = operator.timers.set
        self.key: K
        self.state: S
        """The key's state: change it, or assign another."""
        self.time = 0
        """The time of the item or timer (µs)."""
        self.port = 0
        """The index (0, 1, …) of the united stream that the item came from."""
        self.frontier = MIN
        """The watermark: nothing older is expected. An item is late if its time is below; a late item sees the
        frontier of its own part of the source when it was read."""

    def set_timer(self, at: int) -> None:
        """Call `on_timer` for this key when the watermark reaches `at` (µs)."""
        self._set(self.key, check_time("the time of a timer", at))

    def cancel_timer(self, at: int) -> None:
        """Cancel this key's timer at `at` (µs)."""
        self._operator.timers.cancel(self.key, at)

    def forget(self) -> None:
        """Drop the key's state and timers when this call returns."""
        self.state = FORGET  # type: ignore[assignment]


class Stateful(ABC, Generic[K, T, S, R]):
    """An operator with state, as a class: K keys, T items, S state, R results. State is any picklable object."""

    @abstractmethod
    def initial(self) -> S:
        """Return the state of a key that has none yet."""

    @abstractmethod
    def on_item(self, item: T, context: Context[K, S]) -> Iterable[R] | None:
        """Handle an item; return the results, if any."""

    def on_timer(self, context: Context[K, S]) -> Iterable[R] | None:
        """Handle a timer of this key that is due (at `context.time`); return the results, if any."""
        return None

    def on_end(self, context: Context[K, S]) -> Iterable[R] | None:
        """Handle the end of the stream for this key; return the results, if any."""
        return None


class StatefulSteps(Keyed):
    """Runs a `Stateful` operator."""

    not_results = ASYNCHRONOUS

    def __init__(self, setting: Setting, logic: Stateful[Any, Any, Any, Any]) -> None:
        super().__init__(setting)
        self.logic = logic
        self.context: Context[Any, Any] = Context(self)
        self.floors: dict[Any, int] = {}
        """By key: the frontier that the key saw on another worker, until this worker's frontier reaches it."""
        self._highest = MIN  # highest of the floors

    def push(self, batch: RowBatch) -> None:
        """Call `on_item` for every row."""
        assert batch.keys is not None
        self.touch(batch.keys, batch.values)
        self.fetch(batch.keys)
        context, states, on_item, initial = (
            self.context, self.states, self.logic.on_item, self.logic.initial,
        )  # fmt: skip
        context.port = batch.port
        frontier = context.frontier
        frontiers = self._frontiers(batch)
        get = states.get
        rows = zip(batch.keys, batch.values, batch.each_time(), strict=True)
        copy_each = self._copy_each
        state: Any = None
        with RecordCalls(self, on_item, batch, second=initial) as call:
            append = call.results.append
            on_item, initial = call.following(on_item), call.wrap_second(initial)
            while not call.over:
                try:
                    for key, value, time in rows:
                        context.key, context.time = key, time
                        if frontiers is not None:
                            context.frontier = next(frontiers)
                        state = get(key, _NONE_YET)
                        if state is _NONE_YET:
                            state = initial()
                        context.state = state
                        returned = on_item(value, context)
                        if type(returned) in ASYNCHRONOUS:
                            check_result(self.step, on_item, returned, ASYNCHRONOUS)
                        returned = () if returned is None else copy_each(returned)
                        self._keep(key)
                        append(returned)
                except BaseException as error:
                    call.raised(error)
                    if context.key not in states:
                        self.timers.forget(context.key)  # as if the key had never come
            left = without_rows(batch, call.failed_rows)
            emitted = spread_results(left, call.results)
            if len(emitted):
                last = get(_keys(emitted)[-1])
                self.check_results(
                    on_item, _keys(emitted), emitted.values, last, emitted.values[-1]
                )
        context.frontier = frontier
        self.emit(emitted)

    def _frontiers(self, batch: RowBatch) -> Iterator[int] | None:
        """Return the frontier for each row, or None if all rows see this worker's frontier.

        A late row sees the frontier it was late by; a key from another worker sees no older frontier than it saw there.
        """
        frontier, floor = self.context.frontier, self.floors.get
        late = None if batch.late is None else np.maximum(batch.late, frontier).tolist()
        if not self.floors:
            return None if late is None else iter(late)
        floors = (floor(key, frontier) for key in batch.keys or ())
        return map(max, floors, repeat(frontier) if late is None else late)

    def _copy_each(self, returned: Iterable[Any]) -> list[Any]:
        """Return the results of a call, copying each as soon as it is produced."""
        results: list[Any] = []
        sharing, context = self.sharing, self.context
        for result in returned:
            if sharing.strict:
                sharing.note(result)
            elif type(result) not in ATOMS:
                result = copy_result(context.state, result)
            results.append(result)
        return results

    def _keep(self, key: Any) -> None:
        state = self.context.state
        if state is FORGET:
            self.states.pop(key, None)
            self.timers.forget(key)
        else:
            self.states[key] = state

    # ------------------------------------------------------------ time

    def reached(self, anywhere: bool = False) -> int:
        """Return the frontier as announced to records and timers of this step; with `anywhere`, on any worker."""
        return max(self.context.frontier, self._highest) if anywhere else self.context.frontier

    def restore(self, frontier: int) -> None:
        """Raise the frontier of every key to this one."""
        self.context.frontier = max(self.context.frontier, frontier)

    def restore_keys(self, keys: Collection[Any], frontier: int) -> None:
        """Raise the frontier of these keys to this one."""
        if frontier > self.context.frontier:
            get = self.floors.get
            self.floors.update((key, max(frontier, get(key, frontier))) for key in keys)
            self._highest = max(self._highest, frontier)

    def advance(self, frontier: int) -> None:
        """Fire all timers that are due, in order of time."""
        if frontier == LAST:
            return  # not a time of records, but the moment before the end, which fires the remaining timers
            # After a load the workers announce their frontiers again, from the lowest on.
        frontier = self.context.frontier = max(frontier, self.context.frontier)
        if self.floors and self._highest <= frontier:
            self.floors = {}
        soon = partial(self.timers.soon, frontier, TIMER_FETCH_KEYS) if self.store.spilled else None
        self._call(self.logic.on_timer, self.timers.due(frontier), soon)

    def advance_keys(self, keys: Sequence[Any], frontier: int, latest: int = MIN) -> None:
        """Fire the due timers of these keys; at `MAX`, end the keys."""
        if frontier == LAST:
            return  # as in `advance`: remaining timers move with their keys, and fire at the end
        if self.timers or frontier == MAX:
            self.fetch(keys)
        if frontier == MAX:
            left_of = self.timers.left_of
            self._call(self.logic.on_timer, ((key, at) for key in keys for at in left_of(key)))
            self._end(keys, latest)
            return
        if self.timers:
            due = self.timers.due_of
            pairs = ((key, at) for key in keys for at in due(key, frontier))
            self._call(self.logic.on_timer, pairs)

    def fire_left(self) -> None:
        """Call `on_timer` for every timer, in order of time."""
        soon = None
        if self.store.spilled:
            soon = partial(next, blocks(self.timers.in_order(), TIMER_FETCH_KEYS), [])
        self._call(self.logic.on_timer, self.timers.left(), soon)

    def end_keys(self, latest: int = MIN) -> None:
        """Call `on_end` for every key that has not ended."""
        for keys in self.store.census():
            self.fetch(keys)
            self._end(keys, latest)

    def _end(self, keys: Iterable[Any], latest: int) -> None:
        with KeyCalls(self.step):
            ending = [key for key in keys if key in self.states and key not in self.ended]
            self.touch(ending)
            self.timers.leave(ending)
            self.ended.update(ending)
        # A worker that joined late may see the end before any frontier: its output must not be late.
        time = max(self.context.frontier, latest, 0)
        self._call(self.logic.on_end, ((key, time) for key in ending))
        self.timers.leave(ending)  # a timer that `on_end` sets does not fire: time has ended

    def _call(
        self,
        function: Callable[[Context[Any, Any]], Iterable[Any] | None],
        calls: Iterable[tuple[Any, int]],
        soon: Callable[[], list[Any]] | None = None,
    ) -> None:
        """Call the function for keys and times, and emit its results in bounded batches.

        `soon` returns the keys that are likely to follow, to fetch them together; None: all are fetched already.
        """
        with TimerCalls(self.step, function, self.context) as call:
            self._call_all(call, call.following(function), calls, soon)

    def _call_all(
        self,
        call: TimerCalls,
        function: Callable[[Context[Any, Any]], Iterable[Any] | None],
        calls: Iterable[tuple[Any, int]],
        soon: Callable[[], list[Any]] | None,
    ) -> None:
        context, states, frontier = self.context, self.states, self.context.frontier
        fetched: set[Any] = set()
        keys: list[Any] = []
        values: list[Any] = []
        times: list[int] = []
        for key, at in calls:
            if soon is not None and key not in fetched:
                piece = [key, *soon()]
                self.fetch(piece)
                fetched = set(piece)
            state = states.get(key, _NONE_YET)
            if state is _NONE_YET:
                continue
            context.key, context.time, context.state, context.port = key, at, state, 0
            context.frontier = max(frontier, at, self.floors.get(key, MIN))
            if not call.begun:
                call.begin()
            try:
                returned = function(context)
                check_result(self.step, function, returned, ASYNCHRONOUS)
                results = self._copy_each(returned or ())
            except BaseException as error:
                self.raised_for(function, key, None, at, error, timer=True)
                continue
            finally:
                context.frontier = frontier
            self._keep(key)
            keys += [key] * len(results)
            values += results
            times += [at] * len(results)
            if len(values) >= _TIMER_BATCH_RESULTS:
                self._emit_timed(function, keys, values, times)
                keys, values, times = [], [], []
        if values:
            self._emit_timed(function, keys, values, times)

    def _emit_timed(
        self, function: Callable[..., Any], keys: list[Any], values: list[Any], times: list[int]
    ) -> None:
        self.check_results(function, keys, values, self.states.get(keys[-1]), values[-1])
        self.emit(_timed(keys, values, times))


def _keys(batch: RowBatch) -> Sequence[Any]:
    assert batch.keys is not None
    return batch.keys


def _timed(keys: list[Any], values: list[Any], times: list[int]) -> RowBatch:
    batch = RowBatch.keyed(keys, values)
    batch.times = np.array(times, dtype=np.int64)
    return batch
