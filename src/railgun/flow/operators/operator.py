"""What all operators share: batches in by `push`, out by `emit`, and what happens when a user's function raises.

Operators of a stage call each other synchronously: when `push` returns, nothing is in flight inside the stage.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from railgun.core.errors import RailgunError
from railgun.flow.errors import StepError
from railgun.state.store import KeyStore
from railgun.wire.rows import RowBatch

SHOWN: Final = 500
PLACES: Final = 200  # of which tracebacks are remembered


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record a user's function raised for."""

    step: str
    key: Any
    record: Any
    time: int
    error: str
    traceback: str


@dataclass(slots=True)
class Setting:
    """What an operator is told of its surroundings when it is made."""

    step: str
    on_error: str = "stop"
    dead_letter: Callable[[DeadLetter], None] | None = None
    errors: dict[str, int] = field(default_factory=dict)
    store: Callable[[str], KeyStore] | None = None
    """Makes the store of a step's state, from the step's name; None: state stays in memory."""
    upgrades: tuple[Callable[[Any], Any], ...] = ()
    """For state saved in older forms."""

    @property
    def version(self) -> int:
        """Of the form its state has."""
        return 1 + len(self.upgrades)


class Operator:
    """A step at work on one worker."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.outs: list[Operator] = []

    @property
    def step(self) -> str:
        """The name of the step."""
        return self.setting.step

    def push(self, batch: RowBatch) -> None:
        """Take a batch that is not empty."""
        raise NotImplementedError

    def emit(self, batch: RowBatch) -> None:
        """Hand a batch to all that follow."""
        if len(batch.values):
            for out in self.outs:
                out.push(batch)

    # ------------------------------------------------------------ users' functions that raise

    def each(
        self,
        function: Callable[[Any], Any],
        batch: RowBatch,
        values: Sequence[Any] | None = None,
        user: Callable[..., Any] | None = None,
    ) -> tuple[list[Any], list[int]]:
        """The function's results, and the rows (ascending) it raised for, which have no result.

        `list.extend` keeps what it got before an exception, so the first row that fails is known without a
        Python loop over the others. `values`: what the function is called with, if not the batch's values; `user`:
        the user's function, which is blamed, if `function` stands around it.
        """
        left = iter(batch.values if values is None else values)
        results: list[Any] = []
        failed: list[int] = []
        while len(results) + len(failed) < len(batch):
            try:
                results.extend(map(function, left))
                if len(results) + len(failed) == len(batch):
                    break
                # To `extend` this was the end of the values.
                error: Exception = StopIteration("raised by the function itself")
            except Exception as raised:
                error = raised
            row = len(results) + len(failed)
            self.raised(user or function, batch, row, error)
            failed.append(row)
        return results, failed

    def raised(
        self, function: Callable[..., Any], batch: RowBatch, row: int, error: Exception
    ) -> None:
        """A user's function raised for this row: to the dead letters with it, or stop."""
        key = None if batch.keys is None else batch.keys[row]
        time = batch.times if isinstance(batch.times, int) else int(batch.times[row])
        self.raised_for(function, key, batch.values[row], time, error)

    def raised_for(
        self, function: Callable[..., Any], key: Any, record: Any, time: int, error: Exception
    ) -> None:
        """As `raised`, for a record that is not in a batch."""
        setting = self.setting
        told = tell(error)
        if setting.on_error == "stop" or setting.dead_letter is None:
            shown_key = "" if key is None else shorten(key)
            raise StepError(
                setting.step, name_of(function), shown_key, shorten(record), told
            ) from error
        setting.errors[setting.step] = setting.errors.get(setting.step, 0) + 1
        setting.dead_letter(DeadLetter(setting.step, key, record, time, repr(error), told))


def without(values: Sequence[Any], failed: Iterable[int]) -> list[Any]:
    """The values but for some rows."""
    gone = set(failed)
    return [value for row, value in enumerate(values) if row not in gone]


def tell(error: Exception) -> str:
    """An exception in a message: with its traceback, unless it says all there is to say."""
    if isinstance(error, RailgunError) and not isinstance(error, StepError):
        return f"{type(error).__name__}: {error}"
    hidden = error.__suppress_context__ or error.__context__ is None
    if error.__cause__ is not None or not hidden or isinstance(error, BaseExceptionGroup):
        return "".join(traceback.format_exception(error, limit=-8))
    return _way_to(error) + "".join(traceback.format_exception_only(error))


_ways: dict[tuple[Any, ...], str] = {}


def _way_to(error: Exception) -> str:
    """Where it was raised: mostly at one place, for thousands of records, so that is worked out once."""
    place: list[Any] = []
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        place += code.co_filename, code.co_name, at.tb_lineno, at.tb_lasti
        at = at.tb_next
    known = tuple(place[-32:])  # of eight frames
    found = _ways.get(known)
    if found is None:
        if len(_ways) >= PLACES:
            _ways.clear()
        lines = traceback.format_tb(error.__traceback__, limit=-8)
        found = _ways[known] = "".join(["Traceback (most recent call last):\n", *lines])
    return found


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in a message."""
    return getattr(function, "__qualname__", None) or type(function).__name__


def shorten(value: Any) -> str:
    """A value in a message."""
    try:
        told = repr(value)
    except Exception:
        told = f"<{type(value).__name__} that has no repr>"
    return told if len(told) <= SHOWN else told[:SHOWN] + "…"
