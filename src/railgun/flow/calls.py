"""Calls of user code: the one place where functions of steps, sources, sinks and codecs of users are called from.

Whoever calls user code does it inside a `Call`:

1. **Nothing escapes.** User code may raise any `BaseException` (`asyncio.CancelledError`, `GeneratorExit`,
   `SystemExit`). Outside of a call there are only `Exception`s: a `StepError` that names step, function and record and
   fails the flow, or a dead letter. Only `KeyboardInterrupt` passes: it comes from the terminal.
2. **What runs is known.** `running()` tells the calls a thread is in, the innermost last. A call is entered once for a
   batch, a block of keys or a call of a source or sink, never once for a record; which record of a batch it is at is
   worked out when somebody asks (`RecordCalls.row`), or told for each if `careful`.
3. **No event loop is running.** A worker's own loop runs in the thread that calls user code. During a call asyncio is
   told that none does, so `asyncio.run` works as it does in a plain program: a loop of its own runs inside the call,
   and the worker's loop is the running one again when the call is over.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from railgun.core.errors import pass_interrupt
from railgun.flow.errors import SinkError, SourceError, UserCodeError, may_pass
from railgun.flow.telling import name_of, shorten, tell

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from railgun.flow.operators.operator import Operator
    from railgun.flow.operators.stateful import Context
    from railgun.wire.rows import RowBatch

R = TypeVar("R")

_running: dict[int, list[Call]] = defaultdict(list)


class Observer(Protocol):
    """Hears of every call that is entered and left, in whatever thread; `depth` calls are entered now."""

    def entered(self, call: Call, depth: int) -> None:
        """A call begins."""

    def left(self, depth: int) -> None:
        """A call has ended."""

    def reached(self, call: Call) -> None:
        """A call, the innermost one, has come to its next record; this is told only if `careful`."""


observer: Observer | None = None
"""Who hears of calls: a worker's breadcrumb."""
careful = False
"""Whether the observer hears of each record before a function is called for it. That costs a microsecond or two a
record, so it is for a while after a worker was lost: if it is lost again, the record is known."""


def running(thread: int | None = None) -> list[Call]:
    """Return the calls of user code that a thread (by its identifier; None: this one) is in, the innermost last."""
    return _running[get_ident() if thread is None else thread]


class Call:
    """User code of a step is running; `function` is the function or the name it has in messages."""

    __slots__ = ("_loop", "function", "step")

    def __init__(self, step: str, function: Callable[..., Any] | str) -> None:
        self.step = step
        self.function = function
        self._loop: AbstractEventLoop | None = None  # that was running when the call began

    def __enter__(self) -> Self:
        entered = _running[get_ident()]
        entered.append(self)
        if observer is not None:
            observer.entered(self, len(entered))
        # Without asyncio no loop can be running; programs that need none, as the command line, do not load it.
        if (events := sys.modules.get("asyncio.events")) is not None:
            self._loop = events._get_running_loop()
            if self._loop is not None:
                events._set_running_loop(None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entered = _running[get_ident()]
        entered.pop()
        if observer is not None:
            observer.left(len(entered))
        if self._loop is not None:
            sys.modules["asyncio.events"]._set_running_loop(self._loop)
        if error is not None:
            pass_interrupt(error)
            self.failed(error)

    def following(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return a function that does the same as `function`; if `careful`, it tells the observer of each record."""
        if not careful or observer is None:
            return function
        told = observer

        def follow(*args: Any) -> R:
            told.reached(self)
            return function(*args)

        follow.__qualname__ = name_of(function)  # for messages
        return follow

    def failed(self, error: BaseException) -> None:
        """Raise what names the user code that raised `error`; return to let `error` pass."""
        if not isinstance(error, Exception):
            raise UserCodeError(self.step, self.name, "", "", tell(error)) from error

    @property
    def name(self) -> str:
        """What the function is called in messages."""
        return self.function if isinstance(self.function, str) else name_of(self.function)

    @property
    def record(self) -> Any:
        """The record the function is called for; None if it is not called for a record."""
        return None


class RecordCalls(Call):
    """Calls of a function for the rows of a batch, one after the other: `results` of those that returned.

    The rows that it raised for are in `failed_rows`. Whoever calls catches `BaseException`, and gives it to `raised`.
    """

    __slots__ = ("batch", "failed_rows", "operator", "results")

    def __init__(self, operator: Operator, function: Callable[..., Any], batch: RowBatch) -> None:
        super().__init__(operator.step, function)
        self.operator = operator
        self.batch = batch
        self.results: list[Any] = []
        self.failed_rows: list[int] = []

    @property
    def row(self) -> int:
        """The row of the batch that the function is called for."""
        return len(self.results) + len(self.failed_rows)

    @property
    def over(self) -> bool:
        """Whether the function was called for every row."""
        return self.row == len(self.batch)

    @property
    def record(self) -> Any:
        """The record the function is called for."""
        return None if self.over else self.batch.values[self.row]

    def raised(self, error: BaseException, other: Callable[..., Any] | None = None) -> None:
        """Note that the function raised for the present row: make a dead letter of it, or raise a `StepError`.

        `other`: the function that raised, if it was another one that is called beside it.
        """
        row = self.row
        self.operator.raised(other or self.function, self.batch, row, error)  # type: ignore[arg-type]
        self.failed_rows.append(row)


class TimerCalls(Call):
    """Calls of `on_timer` or `on_end` for keys, one after the other."""

    __slots__ = ("context",)

    def __init__(self, step: str, function: Callable[..., Any], context: Context[Any, Any]) -> None:
        super().__init__(step, function)
        self.context = context

    @property
    def record(self) -> Any:
        """The key and the time the function is called for."""
        return getattr(self.context, "key", None), self.context.time


class SourceCall(Call):
    """A call of a source, for one of its parts."""

    __slots__ = ("part", "position")

    def __init__(self, step: str, source: object, what: str, part: Any, position: Any) -> None:
        super().__init__(step, f"{type(source).__name__}.{what}")
        self.part = part
        self.position = position

    def failed(self, error: BaseException) -> None:
        """Raise a `SourceError`."""
        part, position = shorten(self.part), shorten(self.position)
        failed = SourceError(self.step, self.name, part, position, tell(error))
        failed.passing = may_pass(error)
        raise failed from error


def attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Call `work`, which calls user code, and return its result, or what it raised as an `Exception`.

    For work of another thread: a future cannot hold a `StopIteration`, and takes a `CancelledError` for its own.
    """
    try:
        return work(), None
    except BaseException as error:
        pass_interrupt(error)
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return None, error
        named = UserCodeError("", name_of(work), "", "", tell(error))
        named.__cause__ = error
        return None, named


class SinkCall(Call):
    """A call of a sink or a writer; `items` are those it is called with."""

    __slots__ = ("items",)

    def __init__(self, step: str, sink: object, what: str, items: Any = ()) -> None:
        super().__init__(step, f"{type(sink).__name__}.{what}")
        self.items = items

    @property
    def record(self) -> Any:
        """The first of the items."""
        return self.items[0] if len(self.items) else None

    def failed(self, error: BaseException) -> None:
        """Raise a `SinkError`."""
        record = shorten(self.items[0]) if len(self.items) else ""
        failed = SinkError(self.step, self.name, "", record, tell(error))
        failed.passing = may_pass(error)
        raise failed from error
