"""Calls of user code: the one place where functions of steps, sources, sinks and codecs of users are called from.

Whoever calls user code does it inside a `Call`:

1. **Nothing escapes.** User code may raise any `BaseException` (`asyncio.CancelledError`, `GeneratorExit`,
   `SystemExit`). Outside of a call there are only `Exception`s: a `StepError` that names step, function and record and
   fails the flow, or a dead letter. Only `KeyboardInterrupt` passes, as one that names the call
   (`InterruptedCallError`): it comes from the terminal, or on a worker from that code.
2. **What runs is known.** `running()` tells the calls a thread is in, the innermost last. A call is entered once for a
   batch, a block of keys or a call of a source or sink, never once for a record; which record of a batch it is at is
   worked out when somebody asks (`RecordCalls.row`), or told for each if `careful`. Every call says in words what it
   is for (`Call.which`), and errors, breadcrumbs and what is told of a hang all use these words. This holds for every
   thread: sinks commit in another one than that which calls functions for records (`others`).
3. **No event loop is running.** A worker's own loop runs in the thread that calls user code. During a call asyncio is
   told that none does, so `asyncio.run` works as it does in a plain program: a loop of its own runs inside the call,
   and the worker's loop is the running one again when the call is over.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from operator import length_hint
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

from railgun.engine.operators.describe import name_of, shorten, tell
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
"""How calls that pickle and unpickle states of keys are named."""
KEYS: Final = "__hash__ or __eq__ of keys"
"""How it is named that keys are looked for in a dict or set."""
_KEY_METHODS: Final = frozenset({"__hash__", "__eq__", "__stable_key__"})
NO_PART: Final = object()
"""The part of a source that a call for no part in particular has."""

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


def others(thread: int) -> dict[int, list[Call]]:
    """Return the calls of user code that other threads than `thread` are in, by their identifiers."""
    found = {other: list(within) for other, within in list(_running.items()) if other != thread}
    return {other: within for other, within in found.items() if within}


def told_place(step: str, name: str) -> str:
    """Tell the place of a call whose function has this name, or these names.

    >>> told_place("total", "add"), told_place("", "unpickling the flow")
    ("in step 'total', function add", 'unpickling the flow')
    """
    return f"in step {step!r}, function {name}" if step else name


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
            if isinstance(error, KeyboardInterrupt):
                if isinstance(error, InterruptedCallError):
                    raise error
                told = self.step, self.name, self.which_raised(error), tell(error)
                raise InterruptedCallError(*told) from error
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
            raise self.named(error) from error

    def named(self, error: BaseException) -> UserCodeError:
        """Return an error that names the step, the function and what it was called for."""
        named = UserCodeError(self.step, self.name, "", self.which(), tell(error))
        named.passing = may_pass(error)
        return named

    @property
    def place(self) -> str:
        """Where one is in this call, as in "it was …": in a function of a step, or at what is done for all steps."""
        return told_place(self.step, self.name)

    @property
    def name(self) -> str:
        """What the function is called in messages."""
        return self.function if isinstance(self.function, str) else name_of(self.function)

    @property
    def names(self) -> str:
        """Return the names of the functions that may be called, for messages."""
        return self.name

    def which(self, show: Show = shorten) -> str:
        """Say what the function is called for now, as in "for the record 7"; nothing if for nothing in particular."""
        return ""

    def which_raised(self, error: BaseException) -> str:
        """Say what the function was called for when it raised `error`."""
        return self.which()

    def began_with(self, show: Show) -> str:
        """Say what the call was entered for: where `which` changes from record to record, all of them."""
        return self.which(show)


class RecordCalls(Call):
    """Calls of a function for the rows of a batch, one after the other: `results` of those that returned.

    The rows that it raised for are in `failed_rows`. Whoever calls catches `BaseException`, and gives it to `raised`.
    `at_once`: the function is called once, for all rows. `other`: a function that is called beside it for some rows.
    """

    __slots__ = ("aside", "at_once", "batch", "failed_rows", "operator", "other", "results")

    def __init__(
        self,
        operator: Operator,
        function: Callable[..., Any] | str,
        batch: RowBatch,
        at_once: bool = False,
        other: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(operator.step, function)
        self.operator = operator
        self.batch = batch
        self.at_once = at_once
        self.results: list[Any] = []
        self.failed_rows: list[int] = []
        self.other = other
        self.aside = False  # whether it is `other` that is called now

    def beside(self, other: Callable[[], R]) -> Callable[[], R]:
        """Return a function that does the same as `other`, and lets it be known while it runs."""

        def call_other() -> R:
            self.aside = True
            if careful and observer is not None:
                observer.reached(self)
            result = other()
            self.aside = False
            return result

        return call_other

    @property
    def name(self) -> str:
        """Return the name of the function that is called now, for messages."""
        if self.aside and self.other is not None:
            return name_of(self.other)
        return super().name

    @property
    def names(self) -> str:
        """Return the names of the functions that may be called, for messages."""
        if self.other is None:
            return self.name
        return f"{super().name} or {name_of(self.other)}"

    @property
    def row(self) -> int:
        """The row of the batch that the function is called for."""
        return len(self.results) + len(self.failed_rows)

    @property
    def over(self) -> bool:
        """Whether the function was called for every row."""
        return self.row == len(self.batch)

    def which(self, show: Show = shorten) -> str:
        """Name the record that the function is called for now, with its key."""
        row = self.row
        if self.at_once or row >= len(self.batch):
            return self.began_with(show)
        keys = self.batch.keys
        of = "" if keys is None else f" of key {show(keys[row])}"
        return f"for the record {show(self.batch.values[row])}{of}"

    def began_with(self, show: Show) -> str:
        """Say how many records the batch has, and which is the first."""
        values = self.batch.values
        if not len(values):
            return ""
        return f"in a batch of {len(values)} records that begins with {show(values[0])}"

    def raised(self, error: BaseException, blamed: Callable[..., Any] | None = None) -> None:
        """Note that the function raised for the present row: make a dead letter of it, or raise a `StepError`.

        `blamed`: the function that is named, if it is not the one that is called.
        """
        row = self.row
        called = self.other if self.aside else self.function
        self.operator.raised(blamed or called, self.batch, row, error)  # type: ignore[arg-type]
        self.aside = False
        self.failed_rows.append(row)


class TimerCalls(Call):
    """Calls of `on_timer` or `on_end` for keys, one after the other."""

    __slots__ = ("begun", "context")

    def __init__(self, step: str, function: Callable[..., Any], context: Context[Any, Any]) -> None:
        super().__init__(step, function)
        self.context = context
        self.begun = False

    def begin(self) -> None:
        """Note that the context has the first key, which was not known when the call was entered."""
        self.begun = True
        if observer is not None:
            observer.entered(self, len(running()))

    def which(self, show: Show = shorten) -> str:
        """Name the key and the time that the function is called for now."""
        if not self.begun:
            return ""
        return f"for the key {show(self.context.key)} at time {self.context.time}"

    def began_with(self, show: Show) -> str:
        """Name the first key and its time."""
        if not self.begun:
            return ""
        return (
            f"for keys that begin with the key {show(self.context.key)} at time {self.context.time}"
        )


class ValueCalls(Call):
    """Calls of user code for values that are not rows of a batch; `what` says what they are: "record", "key".

    `done` tells how many have been dealt with; None: nobody knows. `owners`: the objects whose methods are called, one
    for each value, if these are not the values.
    """

    __slots__ = ("done", "owners", "values", "what")

    def __init__(
        self,
        step: str,
        function: Callable[..., Any] | str,
        what: str,
        values: Sequence[Any] = (),
        done: Callable[[], int] | None = None,
        owners: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(step, function)
        self.what = what
        self.values = values
        self.done = done
        self.owners = owners

    def which(self, show: Show = shorten) -> str:
        """Name the value that the code is called for now, or the first of them."""
        at = len(self.values) if self.done is None else self.done()
        return self.told(at, show) if at < len(self.values) else self.began_with(show)

    def told(self, at: int, show: Show) -> str:
        """Name one of the values."""
        return f"for the {self.what} {show(self.values[at])}"

    def which_raised(self, error: BaseException) -> str:
        """Name the value that the code was called for, also where only the way that `error` came tells it."""
        if self.done is None:
            for owners in (self.values, self.owners or ()):
                at = _find_caller(error, owners)
                if at is not None:
                    return self.told(at, shorten)
        return self.which()

    def began_with(self, show: Show) -> str:
        """Say how many values there are, and which is the first."""
        if not len(self.values):
            return ""
        first = show(self.values[0])
        if len(self.values) == 1:
            return f"for the {self.what} {first}"
        return f"for {len(self.values)} {self.what}s that begin with {first}"

    def try_each(self, call: Callable[[Any], object], values: Sequence[Any]) -> None:
        """If `careful`, call `call` for each value alone, so that a loss names the very one.

        The caller then does the same for all of them at once. So what `call` raises is left for that to be raised.
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
        observer.reached(self)  # what follows is for none of them in particular


class KeyCalls(ValueCalls):
    """Keys are looked for in dicts and sets of keys, or put there, which may call their `__hash__` and `__eq__`.

    `keys`: those it is done for, if that is known. `records`: the records they are of, as far as there are any.
    """

    __slots__ = ("records",)

    def __init__(self, step: str, keys: Collection[Any] = (), records: Sequence[Any] = ()) -> None:
        super().__init__(step, KEYS, "key", keys if isinstance(keys, list) else list(keys))
        self.records = records

    def told(self, at: int, show: Show) -> str:
        """Name one of the keys, and its record."""
        of = f" of the record {show(self.records[at])}" if at < len(self.records) else ""
        return super().told(at, show) + of

    def walk(self) -> Iterator[Any]:
        """Return an iterator over the keys: from now to `walked`, the last one it gave is the one that is named."""
        walked = iter(self.values)
        self.done = begun_before(walked, len(self.values))
        return walked

    def walked(self) -> None:
        """Note that what follows is for none of the keys in particular."""
        self.done = None

    def try_keys(self, *places: Container[Any]) -> None:
        """If `careful`, look for each key alone in these dicts or sets, and among each other (`try_each`)."""
        if careful and observer is not None:
            tried: set[Any] = set()

            def look_for(key: Any) -> None:
                tried.add(key)
                for place in places:
                    key in place  # noqa: B015 - for what it calls

            self.try_each(look_for, self.values)

    def failed(self, error: BaseException) -> None:
        """Raise a `UserCodeError` that names the key for what a method of a key raised; let pass what did not."""
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
        named = UserCodeError(self.step, self.name, "", self.which_raised(error), tell(error))
        named.passing = may_pass(error)
        return named


def _find_caller(error: BaseException, owners: Sequence[Any]) -> int | None:
    """Return which of `owners` has the method that `error` came through, or was given to it to be compared.

    None: none, as far as can be known.

    Pickle goes through a list outside of Python, and does not tell how far it is; nor may it be asked to try again, as
    the code that was interrupted may have been hanging.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        for name in frame.f_code.co_varnames[: min(frame.f_code.co_argcount, 2)]:
            given = frame.f_locals.get(name)
            if type(given).__module__ != "builtins":  # these may stand at many places
                for at, owner in enumerate(owners):
                    if owner is given:
                        return at
        trace = trace.tb_next
    return None


def begun_before(walked: Iterator[Any], values: int) -> Callable[[], int]:
    """Return a `done` for `ValueCalls` of values that are walked over outside of Python, and costs nothing there.

    `walked`: the iterator over a list of so many `values`. The last value it gave is the one that is dealt with now.
    Before it gave any, nobody knows.

    >>> walked = iter(["a", "b", "c"])
    >>> done = begun_before(walked, 3)
    >>> done(), next(walked), done(), next(walked), done()
    (3, 'a', 0, 'b', 1)
    """

    def done() -> int:
        left = length_hint(walked)
        return values if left == values else values - left - 1

    return done


class Unpickling(Call):
    """Records that another worker sent to a step are unpickled."""

    __slots__ = ()

    def __init__(self, step: str) -> None:
        super().__init__(step, "unpickle of records")

    def failed(self, error: BaseException) -> None:
        """Raise an `UnloadableRecordError` for what would be raised again."""
        if isinstance(error, CannotUnpickleError):
            raise UnloadableRecordError(self.step, "", "", "", str(error)) from error
        super().failed(error)


class SourceCall(Call):
    """A call of a source, for one of its parts."""

    __slots__ = ("part", "position")

    def __init__(self, step: str, source: object, what: str, part: Any, position: Any) -> None:
        super().__init__(step, f"{type(source).__name__}.{what}")
        self.part = part
        self.position = position

    def which(self, show: Show = shorten) -> str:
        """Name the part, and the position in it."""
        if self.part is NO_PART:
            return ""
        at = "its beginning" if self.position is None else f"position {show(self.position)}"
        return f"for part {show(self.part)} at {at}"

    def failed(self, error: BaseException) -> None:
        """Raise a `SourceError`."""
        part = "" if self.part is NO_PART else shorten(self.part)
        position = "" if self.position is None else shorten(self.position)
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

    def which(self, show: Show = shorten) -> str:
        """Say how many items there are, and which is the first."""
        if not len(self.items):
            return ""
        return f"for {len(self.items)} items that begin with {show(self.items[0])}"

    def failed(self, error: BaseException) -> None:
        """Raise a `SinkError`."""
        record = shorten(self.items[0]) if len(self.items) else ""
        failed = SinkError(self.step, self.name, "", record, tell(error))
        failed.passing = may_pass(error)
        raise failed from error


class TokenCall(SinkCall):
    """A call of a sink for what was prepared for a snapshot; `items` are the tokens."""

    __slots__ = ()

    def which(self, show: Show = shorten) -> str:
        """Name the token; of several, how many there are, and the first."""
        if len(self.items) == 1:
            return f"for the token {show(self.items[0])}"
        if not len(self.items):
            return ""
        return f"for {len(self.items)} tokens that begin with {show(self.items[0])}"

    def failed(self, error: BaseException) -> None:
        """Raise a `TokenError`."""
        named = self.which().removeprefix("for ")
        failed = TokenError(self.step, self.name, "", named, tell(error))
        failed.passing = may_pass(error)
        raise failed from error
