"""Errors of flows: in their definition, in user code, in sources and sinks."""

from __future__ import annotations

import errno
from typing import Final

from railgun.errors import ExitCode, RailgunError
from railgun.transport.columns import CannotUnpickleError, EncodingError

LASTING_ERRNOS: Final = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.EBADF,
})  # fmt: skip
"""Error numbers of requests that the system would refuse again if they were repeated."""


class FlowError(RailgunError):
    """A flow is not defined correctly. Raised where it is defined; the message names the line."""

    exit_code = ExitCode.NO_FLOW
    kind = "flow"


class StepError(RailgunError):
    """A user's function raised for a record, and its step's policy is to stop."""

    passing = False
    """Whether the cause is outside, on a disk or in a network, so that another try may succeed."""

    def __init__(self, step: str, function: str, key: str, record: str, cause: str) -> None:
        super().__init__(step, function, key, record, cause)
        self.step, self.function, self.key, self.record, self.cause = (
            step, function, key, record, cause,
        )  # fmt: skip

    def __str__(self) -> str:
        where = f"step {self.step!r}: {self.function} raised"
        which = f"for the record {self.record}" + (f" of key {self.key}" if self.key else "")
        return (
            f"{where} {which}\n{self.cause.rstrip()}\n"
            "To go on without such records give the step on_error='dead_letter'."
        )


class TimerError(StepError):
    """A user's `on_timer` or `on_end` raised; `record` is the time it was called for."""

    def __str__(self) -> str:
        return (
            f"step {self.step!r}: {self.function} raised for the key {self.key} at time {self.record}\n"
            f"{self.cause.rstrip()}\nTo go on without such calls give the step on_error='dead_letter'."
        )


class UserCodeError(StepError):
    """User code raised outside of any record: in a codec, a key, a close. `record` names what it was called for."""

    def __str__(self) -> str:
        which = f" {self.record}" if self.record else ""
        where = f"step {self.step!r}: {self.function}" if self.step else self.function
        return f"{where} raised{which}\n{self.cause.rstrip()}"


class InterruptedCallError(KeyboardInterrupt):
    """A `KeyboardInterrupt` came out of user code; the message names the step, the function and the record.

    It passes wherever a `KeyboardInterrupt` does, and ends the program whose terminal it came from. A worker has no
    terminal: there the user code itself raised it, and it fails the flow.
    """

    def __init__(self, step: str, function: str, which: str, cause: str) -> None:
        super().__init__(step, function, which, cause)
        self.step, self.function, self.which, self.cause = step, function, which, cause

    def __str__(self) -> str:
        which = f" {self.which}" if self.which else ""
        where = f"step {self.step!r}: {self.function}" if self.step else self.function
        return f"{where} raised{which}\n{self.cause.rstrip()}"


class NotAResultError(StepError):
    """A function returned a coroutine or a generator instead of a result.

    `record` is the kind of object, `cause` says what to do.
    """

    def __str__(self) -> str:
        return (
            f"step {self.step!r}: {self.function} returned a {self.record}, which is no result, as nobody runs it: "
            f"{self.cause}"
        )


class NotAPairError(RailgunError):
    """A function of `stateful_map` returned something else than a state and a result."""


class PartError(RailgunError):
    """A value cannot be a part of a source."""


class NotAStateError(NotAResultError):
    """A function returned a coroutine or a generator as the state of a key."""

    def __str__(self) -> str:
        return (
            f"step {self.step!r}: {self.function} returned a {self.record} as the state of key {self.key}, which is no "
            f"state, as nobody runs it, and it can be neither saved nor moved: {self.cause}"
        )


class UnpicklableStateError(StepError):
    """The state of a key is of a type that pickle refuses: it could be neither moved nor saved."""

    def __str__(self) -> str:
        return (
            f"step {self.step!r}: the state of key {self.key} is of type {self.record}, and cannot be pickled: "
            f"{self.cause}. State moves between workers and is saved, so it is made of what pickle takes: no open "
            "files, locks, connections or generators."
        )


class UnloadableStateError(StepError):
    """The state of a key can be pickled but not unpickled: it could be neither moved nor loaded."""

    def __str__(self) -> str:
        return (
            f"step {self.step!r}: the state of key {self.key} is of type {self.record}, which can be pickled, but "
            f"cannot be unpickled: {self.cause}. State moves between workers and is saved and loaded, so its class "
            "says by __reduce__ or __getstate__ how it is made again; an exception with arguments of its own has to."
        )


class UnpicklableRecordError(StepError):
    """A record is of a type that pickle refuses, and cannot be sent to another worker."""

    def __str__(self) -> str:
        of = f" of key {self.key}" if self.key else ""
        return f"step {self.step!r}: a record{of} cannot be sent to another worker: {self.cause}"


class UnloadableRecordError(StepError):
    """Records or states that another worker sent cannot be unpickled here."""

    def __str__(self) -> str:
        return (
            f"step {self.step!r}: what another worker has sent cannot be unpickled: {self.cause}. Records and states "
            "travel between workers, so their classes say by __reduce__ or __getstate__ how they are made again."
        )


class UncollectableError(StepError):
    """Items of a `Collect` sink cannot be unpickled in the program that started the flow."""

    def __str__(self) -> str:
        return (
            f"sink {self.step!r}: the program that started the flow cannot unpickle the items that Collect brings: "
            f"{self.cause}. Their classes say by __reduce__ or __getstate__ how they are made again."
        )


class UpgradeError(StepError):
    """A function that brings saved state to its current form raised."""

    def __str__(self) -> str:
        subject = f"the saved state {self.record} of key {self.key}"
        return f"step {self.step!r}: {self.function}, one of its upgrades, raised for {subject}\n{self.cause.rstrip()}"


class SourceError(StepError):
    """A source could not be opened or read."""

    def __str__(self) -> str:
        at = f"position {self.record}" if self.record else "its beginning"
        part = f" for part {self.key} at {at}" if self.key else ""
        return f"source {self.step!r}: {self.function} failed{part}\n{self.cause.rstrip()}"


class SinkError(StepError):
    """A call of a sink or of its writer failed."""

    def __str__(self) -> str:
        subject = f" for items that begin with {self.record}" if self.record else ""
        return f"sink {self.step!r}: {self.function} failed{subject}\n{self.cause.rstrip()}"


class TokenError(SinkError):
    """A sink did not commit or recover output prepared for a snapshot; `record` names the token, or the first."""

    def __str__(self) -> str:
        subject = f" for {self.record}" if self.record else ""
        return f"sink {self.step!r}: {self.function} failed{subject}\n{self.cause.rstrip()}"


def may_pass(error: BaseException | None) -> bool:
    """Return whether an error of a source or sink comes from outside, and may be gone at the next try.

    >>> may_pass(OSError(errno.ENOSPC, "no space left")), may_pass(PermissionError(errno.EACCES, "no"))
    (True, False)
    >>> may_pass(TimeoutError("no answer")), may_pass(TypeError("not JSON"))
    (True, False)
    """
    while error is not None:
        if isinstance(error, OSError):
            return error.errno not in LASTING_ERRNOS
        error = error.__cause__
    return False


def is_permanent(error: BaseException, saves: bool) -> bool:
    """Return whether a worker that starts again would fail in the same way. This is decided only here.

    `saves`: whether the flow takes snapshots. Without them it would begin anew, which is not worth it for a full disk.

    - An error of user code would come again, except one from outside that may pass (`may_pass`).
      So would a `KeyboardInterrupt` of user code: no terminal interrupts a worker inside of a call.
    - So would an error of a value that cannot be pickled or unpickled, or of a missing module.
    - A lost connection, a timeout, a file that another process holds, a momentary bug would not.
    """
    if isinstance(error, StepError):
        return not (error.passing and saves)
    return isinstance(
        error, InterruptedCallError | EncodingError | CannotUnpickleError | ImportError
    )


class ConnectorError(RailgunError):
    """A source or sink was given an impossible request, or is in a state in which it cannot go on."""


class LostOutputError(ConnectorError):
    """Output prepared for a snapshot is neither in its staging place nor at its destination."""
