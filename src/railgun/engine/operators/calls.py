"""Call user code: functions of steps, sources, sinks and codecs of users are called only through this module.

All user code is called inside a `Call`:

1. **Nothing escapes.** User code may raise any `BaseException` (`asyncio.CancelledError`, `GeneratorExit`,
   `SystemExit`). A call turns it into an `Exception`: a `StepError` that names step, function and record and fails the
   flow, or a dead letter. Only `KeyboardInterrupt` passes, as an `InterruptedCallError` that names the call: it comes
   from the terminal, or on a worker from that code.
2. **The running call is known.** `running()` returns the calls a thread is in, the innermost last. A call is entered
   once for a batch, a block of keys or a call of a source or sink, never once for a record; the current record of a
   batch is computed on request (`RecordCalls.row`), or reported for each record if `careful`. Every call describes its
   purpose in words (`Call.which`); errors, breadcrumbs and reports of a hang all use these words. This holds for every
   thread: sinks commit in another thread than that which calls functions for records (`calls_of_other_threads`).
3. **No event loop is running.** A worker's own loop runs in the thread that calls user code. During a call asyncio is
   told that none does, so `asyncio.run` works as in a plain program: a loop of its own runs inside the call, and the
   worker's loop is the running one again when the call is over.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from operator import length_hint
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

from railgun.engine.operators.describe import describe_error, name_of, shorten
from railgun.errors import RailgunError, pass_interrupt
from railgun.flows.errors import (
    InterruptedCallError,
    SinkError,
    SourceError,
    TokenError,
    UnloadableRecordError,
    UserCodeError,
    may_pass,
)
from railgun.transport.columns import CannotUnpickleError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from railgun.engine.operators.operator import Operator
    from railgun.engine.operators.stateful import Context
    from railgun.transport.rows import RowBatch

R = TypeVar("R")
Show = Callable[[Any], str]
"""Makes a short text of a record, a key or a position."""
PICKLE: Final = "pickle of state"
UNPICKLE: Final = "unpickle of state"
"""Names, in messages, of calls that pickle and unpickle states of keys."""
KEYS: Final = "__hash__ or __eq__ of keys"
"""Name, in messages, of lookups of keys in a dict or set."""
_KEY_METHODS: Final = frozenset({"__hash__", "__eq__", "__stable_key__"})
NO_PART: Final = object()
"""The part of a `SourceCall` that is for no part in particular."""

_running: dict[int, list[Call]] = defaultdict(list)


class Observer(Protocol):
    """Hears of every call that is entered and left, in any thread; `depth` is the number of calls entered now."""

    def entered(self, call: Call, depth: int) -> None:
        """Take note that a call begins."""

    def left(self, depth: int) -> None:
        """Take note that a call has ended."""

    def reached(self, call: Call) -> None:
        """Take note that the innermost call has come to its next record; called only if `careful`."""


observer: Observer | None = None
"""The observer of all calls: a worker's breadcrumb."""
careful = False
"""Whether the observer hears of each record before a function is called for it. That costs a microsecond or two a
record, so it is on only for a while after a worker was lost: if it is lost again, the record is known."""


def running(thread: int | None = None) -> list[Call]:
    """Return the calls of user code that a thread (by its identifier; None: this one) is in, the innermost last."""
    return _running[get_ident() if thread is None else thread]


def calls_of_other_threads(thread: int) -> dict[int, list[Call]]:
    """Return the calls of user code that other threads than `thread` are in, by their identifiers."""
    calls = {
        thread_id: list(entered)
        for thread_id, entered in list(_running.items())
        if thread_id != thread
    }
    return {thread_id: entered for thread_id, entered in calls.items() if entered}


def place_text(step: str, name: str) -> str:
    """Return the place of a call as text; `name` is that of the function, or of several.

    >>> place_text("total", "add"), place_text("", "unpickling the flow")
    ("in step 'total', function add", 'unpickling the flow')
    """
    return f"in step {step!r}, function {name}" if step else name


class Call:
    """A context in which user code of a step runs; `function` is the function or its name in messages."""

    __slots__ = ("_loop", "function", "step")

    def __init__(self, step: str, function: Callable[..., Any] | str) -> None:
        self.step = step
        self.function = function
        self._loop: AbstractEventLoop | None = None  # the loop that was running when the call began

    def __enter__(self) -> Self:
        entered = _running[get_ident()]
        entered.append(self)
        if observer is not None:
            observer.entered(self, len(entered))
        # Without asyncio no loop can be running; programs without a loop, like the command line, do not load it.
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
            if isinstance(error, KeyboardInterrupt):
                if isinstance(error, InterruptedCallError):
                    raise error
                details = self.step, self.name, self.which_raised(error), describe_error(error)
                raise InterruptedCallError(*details) from error
            pass_interrupt(error)
            self.failed(error)

    def following(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return a function that does the same as `function`; if `careful`, it reports each record to the observer."""
        if not careful or observer is None:
            return function
        notified = observer

        def follow(*args: Any) -> R:
            notified.reached(self)
            return function(*args)

        follow.__qualname__ = name_of(function)  # for messages
        return follow

    def failed(self, error: BaseException) -> None:
        """Raise an error that names the user code that raised `error`; return to let `error` pass."""
        if not isinstance(error, Exception):
            raise self.named(error) from error

    def named(self, error: BaseException) -> UserCodeError:
        """Return an error that names the step, the function and what it was called for."""
        named = UserCodeError(self.step, self.name, "", self.which(), describe_error(error))
        named.passing = may_pass(error)
        return named

    @property
    def place(self) -> str:
        """Return the place of this call, to follow "it was": in a function of a step, or in work for all steps."""
        return place_text(self.step, self.name)

    @property
    def name(self) -> str:
        """Return the name of the function in messages."""
        return self.function if isinstance(self.function, str) else name_of(self.function)

    @property
    def names(self) -> str:
        """Return the names of the functions that may be called, for messages."""
        return self.name

    def which(self, show: Show = shorten) -> str:
        """Return what the function is called for now, as in "for the record 7", or "" if nothing in particular."""
        return ""

    def which_raised(self, error: BaseException) -> str:
        """Return what the function was called for when it raised `error`, as `which` does."""
        return self.which()

    def began_with(self, show: Show) -> str:
        """Return what the call was entered for: where `which` changes from record to record, all records."""
        return self.which(show)


class RecordCalls(Call):
    """Calls a function for the rows of a batch, in order; `results` has the results of the rows that succeeded.

    `failed_rows` has the rows that the function raised for. The caller catches `BaseException` and gives it to
    `raised`. `at_once`: the function is called once, for all rows. `second`: a function also called for some rows.
    """

    __slots__ = ("at_once", "batch", "failed_rows", "in_second", "operator", "results", "second")

    def __init__(
        self,
        operator: Operator,
        function: Callable[..., Any] | str,
        batch: RowBatch,
        at_once: bool = False,
        second: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(operator.step, function)
        self.operator = operator
        self.batch = batch
        self.at_once = at_once
        self.results: list[Any] = []
        self.failed_rows: list[int] = []
        self.second = second
        self.in_second = False  # whether `second` is being called

    def wrap_second(self, second: Callable[[], R]) -> Callable[[], R]:
        """Return a function that does the same as `second`, and marks the call as one of `second` while it runs."""

        def call_second() -> R:
            self.in_second = True
            if careful and observer is not None:
                observer.reached(self)
            result = second()
            self.in_second = False
            return result

        return call_second

    @property
    def name(self) -> str:
        """Return the name of the function that is called now, for messages."""
        if self.in_second and self.second is not None:
            return name_of(self.second)
        return super().name

    @property
    def names(self) -> str:
        """Return the names of the functions that may be called, for messages."""
        if self.second is None:
            return self.name
        return f"{super().name} or {name_of(self.second)}"

    @property
    def row(self) -> int:
        """Return the row of the batch that the function is called for."""
        return len(self.results) + len(self.failed_rows)

    @property
    def over(self) -> bool:
        """Return whether the function was called for every row."""
        return self.row == len(self.batch)

    def which(self, show: Show = shorten) -> str:
        """Return the record that the function is called for now, with its key, as text."""
        row = self.row
        if self.at_once or row >= len(self.batch):
            return self.began_with(show)
        keys = self.batch.keys
        of = "" if keys is None else f" of key {show(keys[row])}"
        return f"for the record {show(self.batch.values[row])}{of}"

    def began_with(self, show: Show) -> str:
        """Return the number of records in the batch and the first of them, as text."""
        values = self.batch.values
        if not len(values):
            return ""
        return f"in a batch of {len(values)} records that begins with {show(values[0])}"

    def raised(self, error: BaseException, user_function: Callable[..., Any] | None = None) -> None:
        """Record that the function raised for the current row: make a dead letter of it, or raise a `StepError`.

        `user_function` is the function to name, if not the one that is called.
        """
        row = self.row
        called = self.second if self.in_second else self.function
        self.operator.raised(user_function or called, self.batch, row, error)  # type: ignore[arg-type]
        self.in_second = False
        self.failed_rows.append(row)


class TimerCalls(Call):
    """Calls `on_timer` or `on_end` for keys, in order."""

    __slots__ = ("begun", "context")

    def __init__(self, step: str, function: Callable[..., Any], context: Context[Any, Any]) -> None:
        super().__init__(step, function)
        self.context = context
        self.begun = False

    def begin(self) -> None:
        """Take note that the context has the first key, which was not known when the call was entered."""
        self.begun = True
        if observer is not None:
            observer.entered(self, len(running()))

    def which(self, show: Show = shorten) -> str:
        """Return the key and the time that the function is called for now, as text."""
        if not self.begun:
            return ""
        return f"for the key {show(self.context.key)} at time {self.context.time}"

    def began_with(self, show: Show) -> str:
        """Return the first key and its time, as text."""
        if not self.begun:
            return ""
        return (
            f"for keys that begin with the key {show(self.context.key)} at time {self.context.time}"
        )


class ValueCalls(Call):
    """Calls user code for values that are not rows of a batch; `noun` is their noun: "record", "key".

    `done` returns how many values are finished (None: unknown). `owners` are the objects whose methods are called, one
    for each value, if these are not the values.
    """

    __slots__ = ("done", "noun", "owners", "values")

    def __init__(
        self,
        step: str,
        function: Callable[..., Any] | str,
        noun: str,
        values: Sequence[Any] = (),
        done: Callable[[], int] | None = None,
        owners: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(step, function)
        self.noun = noun
        self.values = values
        self.done = done
        self.owners = owners

    def which(self, show: Show = shorten) -> str:
        """Return the value that the code is called for now, or else the first of them, as text."""
        at = len(self.values) if self.done is None else self.done()
        return self.value_text(at, show) if at < len(self.values) else self.began_with(show)

    def value_text(self, at: int, show: Show) -> str:
        """Return the value with this index as text."""
        return f"for the {self.noun} {show(self.values[at])}"

    def which_raised(self, error: BaseException) -> str:
        """Return the value that the code was called for as text, found by the traceback of `error` if need be."""
        if self.done is None:
            for owners in (self.values, self.owners or ()):
                at = _find_caller(error, owners)
                if at is not None:
                    return self.value_text(at, shorten)
        return self.which()

    def began_with(self, show: Show) -> str:
        """Return the number of values and the first of them, as text."""
        if not len(self.values):
            return ""
        first = show(self.values[0])
        if len(self.values) == 1:
            return f"for the {self.noun} {first}"
        return f"for {len(self.values)} {self.noun}s that begin with {first}"

    def try_each(self, call: Callable[[Any], object], values: Sequence[Any]) -> None:
        """If `careful`, call `call` for each value alone, so that the breadcrumb of a lost worker names the value.

        The caller then does the same for all of them at once, and raises any error: one that `call` raises is ignored.
        """
        if not careful or observer is None:
            return
        tried: list[Any] = []
        done, self.done = self.done, tried.__len__
        for value in values:
            observer.reached(self)
            try:
                call(value)
            except BaseException as error:
                pass_interrupt(error)
                break
            tried.append(value)
        self.done = done
        observer.reached(self)  # the code that follows is for no value in particular


class KeyCalls(ValueCalls):
    """Looks up or adds keys in dicts and sets, which may call the keys' `__hash__` and `__eq__`.

    `keys` are the keys concerned, if known. `records` are the keys' records, as far as there are any.
    """

    __slots__ = ("records",)

    def __init__(self, step: str, keys: Collection[Any] = (), records: Sequence[Any] = ()) -> None:
        super().__init__(step, KEYS, "key", keys if isinstance(keys, list) else list(keys))
        self.records = records

    def value_text(self, at: int, show: Show) -> str:
        """Return a key and its record as text."""
        of = f" of the record {show(self.records[at])}" if at < len(self.records) else ""
        return super().value_text(at, show) + of

    def walk(self) -> Iterator[Any]:
        """Return an iterator over the keys: until `walked` is called, errors name the last key it yielded."""
        walked = iter(self.values)
        self.done = begun_before(walked, len(self.values))
        return walked

    def walked(self) -> None:
        """Take note that the code that follows is for no key in particular."""
        self.done = None

    def try_keys(self, *places: Container[Any]) -> None:
        """If `careful`, look up each key alone in these dicts or sets, and among each other (`try_each`)."""
        if careful and observer is not None:
            tried: set[Any] = set()

            def look_for(key: Any) -> None:
                tried.add(key)
                for place in places:
                    key in place  # noqa: B015 - for its calls of __hash__ and __eq__

            self.try_each(look_for, self.values)

    def failed(self, error: BaseException) -> None:
        """Raise a `UserCodeError` that names the key for an error of a key's method; let other errors pass."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_name in _KEY_METHODS and not isinstance(
                error, RailgunError
            ):
                raise self.named(error) from error
            trace = trace.tb_next
        super().failed(error)

    def named(self, error: BaseException) -> UserCodeError:
        """Return an error that names the step, the methods and the key."""
        named = UserCodeError(
            self.step, self.name, "", self.which_raised(error), describe_error(error)
        )
        named.passing = may_pass(error)
        return named


def _find_caller(error: BaseException, owners: Sequence[Any]) -> int | None:
    """Return the index of the owner whose method `error` came through, or that was an argument of a comparison.

    Return None if no owner is found.

    Pickle walks over a list outside of Python, and does not tell how far it is; nor may it be asked to try again, as
    the code that was interrupted may have been hanging.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        for name in frame.f_code.co_varnames[: min(frame.f_code.co_argcount, 2)]:
            argument = frame.f_locals.get(name)
            if type(argument).__module__ != "builtins":  # built-in values may occur at many places
                for at, owner in enumerate(owners):
                    if owner is argument:
                        return at
        trace = trace.tb_next
    return None


def begun_before(walked: Iterator[Any], values: int) -> Callable[[], int]:
    """Return a `done` for `ValueCalls` of values that C code iterates over, at no cost per value.

    `walked` is the iterator over a list of so many `values`. The last value it yielded is the current one. Before the
    first, the current one is unknown.

    >>> walked = iter(["a", "b", "c"])
    >>> done = begun_before(walked, 3)
    >>> done(), next(walked), done(), next(walked), done()
    (3, 'a', 0, 'b', 1)
    """

    def done() -> int:
        remaining = length_hint(walked)
        return values if remaining == values else values - remaining - 1

    return done


class Unpickling(Call):
    """Unpickles records that another worker sent to a step."""

    __slots__ = ()

    def __init__(self, step: str) -> None:
        super().__init__(step, "unpickle of records")

    def failed(self, error: BaseException) -> None:
        """Raise an `UnloadableRecordError` for an error that would come again."""
        if isinstance(error, CannotUnpickleError):
            raise UnloadableRecordError(self.step, "", "", "", str(error)) from error
        super().failed(error)


class SourceCall(Call):
    """A call of a source, for one of its parts."""

    __slots__ = ("part", "position")

    def __init__(self, step: str, source: object, method: str, part: Any, position: Any) -> None:
        super().__init__(step, f"{type(source).__name__}.{method}")
        self.part = part
        self.position = position

    def which(self, show: Show = shorten) -> str:
        """Return the part and the position in it, as text."""
        if self.part is NO_PART:
            return ""
        at = "its beginning" if self.position is None else f"position {show(self.position)}"
        return f"for part {show(self.part)} at {at}"

    def failed(self, error: BaseException) -> None:
        """Raise a `SourceError` that names the part and the position."""
        part = "" if self.part is NO_PART else shorten(self.part)
        position = "" if self.position is None else shorten(self.position)
        failed = SourceError(self.step, self.name, part, position, describe_error(error))
        failed.passing = may_pass(error)
        raise failed from error


def attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Call `work`, which calls user code, and return its result, or its error as an `Exception`.

    For work of another thread: a future cannot hold a `StopIteration`, and takes a `CancelledError` for its own.
    """
    try:
        return work(), None
    except BaseException as error:
        pass_interrupt(error)
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return None, error
        named = UserCodeError("", name_of(work), "", "", describe_error(error))
        named.__cause__ = error
        return None, named


class SinkCall(Call):
    """A call of a sink or a writer; `items` are those it is called with."""

    __slots__ = ("items",)

    def __init__(self, step: str, sink: object, method: str, items: Any = ()) -> None:
        super().__init__(step, f"{type(sink).__name__}.{method}")
        self.items = items

    def which(self, show: Show = shorten) -> str:
        """Return the number of items and the first of them, as text."""
        if not len(self.items):
            return ""
        return f"for {len(self.items)} items that begin with {show(self.items[0])}"

    def failed(self, error: BaseException) -> None:
        """Raise a `SinkError` that names the first item."""
        record = shorten(self.items[0]) if len(self.items) else ""
        failed = SinkError(self.step, self.name, "", record, describe_error(error))
        failed.passing = may_pass(error)
        raise failed from error


class TokenCall(SinkCall):
    """A call of a sink for tokens, which stand for output prepared for a snapshot; `items` are the tokens."""

    __slots__ = ()

    def which(self, show: Show = shorten) -> str:
        """Return the token as text; of several tokens, their number and the first."""
        if len(self.items) == 1:
            return f"for the token {show(self.items[0])}"
        if not len(self.items):
            return ""
        return f"for {len(self.items)} tokens that begin with {show(self.items[0])}"

    def failed(self, error: BaseException) -> None:
        """Raise a `TokenError` that names the tokens."""
        named = self.which().removeprefix("for ")
        failed = TokenError(self.step, self.name, "", named, describe_error(error))
        failed.passing = may_pass(error)
        raise failed from error
