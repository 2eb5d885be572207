"""Base class of operators: take batches by `push`, emit them by `emit`, and handle errors of user functions.

Operators of a stage call each other synchronously: when `push` returns, nothing is in flight inside the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter, methodcaller
from types import BuiltinFunctionType, MethodDescriptorType
from typing import TYPE_CHECKING, Any, Final

from railgun.engine.operators.calls import RecordCalls
from railgun.engine.operators.consumers import Consumers
from railgun.engine.operators.describe import describe_error as describe_error
from railgun.engine.operators.describe import name_of as name_of
from railgun.engine.operators.describe import shorten as shorten
from railgun.engine.operators.functions import ASYNCHRONOUS, check_result
from railgun.engine.state.store import KeyStore
from railgun.errors import pass_interrupt, represent
from railgun.flows.errors import NotAResultError, StepError, TimerError
from railgun.transport.rows import RowBatch

if TYPE_CHECKING:
    from railgun.engine.operators.ways import Ways


FAST_MAPPED_TYPES: Final = frozenset(
    {itemgetter, attrgetter, methodcaller, BuiltinFunctionType, MethodDescriptorType}
)
"""Types of functions that `map` calls in half the time. A StopIteration that the function raises reaches the caller
without its message: so Python functions, whose message matters more, are called one by one (which takes as long)."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that a user's function raised for."""

    step: str
    key: Any
    record: Any
    time: int
    error: str
    traceback: str


@dataclass(slots=True)
class Setting:
    """The settings and surroundings of an operator, given when it is made."""

    step: str
    on_error: str = "stop"
    dead_letter: Callable[[DeadLetter], None] | None = None
    errors: dict[str, int] = field(default_factory=dict)
    store: Callable[[str], KeyStore] | None = None
    """Makes the store of a step's state, from the step's name; None: state stays in memory."""
    upgrades: tuple[Callable[[Any], Any], ...] = ()
    """Functions that bring state saved in older forms to the current form, one per version."""

    @property
    def version(self) -> int:
        """Return the version of the current form of the step's state."""
        return 1 + len(self.upgrades)


class Operator:
    """The instance of a step on one worker."""

    not_results: frozenset[type] = ASYNCHRONOUS
    """Types of objects that are no results of the step's function."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.outs: list[Operator] = []
        self.parting: Ways | None = None
        """Set if ways that part here meet again in the stage."""
        self.consumers: Consumers | None = None
        """Hands batches to `outs` if there are several."""

    @property
    def step(self) -> str:
        """Return the name of the step."""
        return self.setting.step

    def push(self, batch: RowBatch) -> None:
        """Process a batch that is not empty."""
        raise NotImplementedError

    def emit(self, batch: RowBatch) -> None:
        """Hand a batch to all operators that follow."""
        if not len(batch.values):
            return
        if self.consumers is None:
            for out in self.outs:
                out.push(batch)
        elif self.parting is None:
            self.consumers.push(batch)
        else:
            with self.parting.parting():
                self.consumers.push(batch)

    def next_operators(self) -> list[Operator]:
        """Return the operators that batches go to from here."""
        return self.outs

    # ------------------------------------------------------------ errors of user functions

    def each(
        self,
        function: Callable[[Any], Any],
        batch: RowBatch,
        values: Sequence[Any] | None = None,
        user: Callable[..., Any] | None = None,
    ) -> tuple[list[Any], list[int]]:
        """Call a function for every row; return its results, and the rows (ascending) it raised for.

        `values` are the arguments, if not the batch's values. `user` is the user's function to name in errors, if
        `function` wraps it.
        """
        remaining = iter(batch.values if values is None else values)
        with RecordCalls(self, user or function, batch) as call:
            results = call.results
            append = results.append
            called = call.following(function)
            while not call.over:
                try:
                    if type(called) in FAST_MAPPED_TYPES:
                        results.extend(map(called, remaining))
                        if not call.over:  # to `map` a StopIteration is the end of the values
                            raise StopIteration
                    else:
                        for value in remaining:
                            append(called(value))
                except BaseException as error:
                    call.raised(error)
        if results:
            for result in results[0], results[-1]:
                check_result(self.step, user or function, result, self.not_results)
        return results, call.failed_rows

    def raised(
        self, function: Callable[..., Any] | str, batch: RowBatch, row: int, error: BaseException
    ) -> None:
        """Handle an error of a user's function for this row: make a dead letter, or raise a `StepError`."""
        key = None if batch.keys is None else batch.keys[row]
        time = batch.times if isinstance(batch.times, int) else int(batch.times[row])
        self.raised_for(function, key, batch.values[row], time, error)

    def raised_for(
        self,
        function: Callable[..., Any] | str,
        key: Any,
        record: Any,
        time: int,
        error: BaseException,
        timer: bool = False,
    ) -> None:
        """Do the same as `raised`, for a record that is not in a batch.

        A function that returns coroutines always stops the flow. `timer`: the function was called for a key and a time,
        not for a record.
        """
        pass_interrupt(error)
        if isinstance(error, NotAResultError):
            raise error
        setting = self.setting
        error_text = describe_error(error)
        if setting.on_error == "stop" or setting.dead_letter is None:
            where = setting.step, function if isinstance(function, str) else name_of(function)
            if timer:
                raise TimerError(*where, shorten(key), str(time), error_text) from error
            shown_key = "" if key is None else shorten(key)
            raise StepError(*where, shown_key, shorten(record), error_text) from error
        setting.errors[setting.step] = setting.errors.get(setting.step, 0) + 1
        setting.dead_letter(
            DeadLetter(setting.step, key, record, time, represent(error), error_text)
        )


def without_values(values: Sequence[Any], failed: Iterable[int]) -> list[Any]:
    """Return the values without those of the failed rows."""
    failed_rows = set(failed)
    return [value for row, value in enumerate(values) if row not in failed_rows]
