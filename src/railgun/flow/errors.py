"""What can be wrong with a flow, and with a record in one."""

from __future__ import annotations

import errno
from typing import Final

from railgun.core.errors import RailgunError

LASTING: Final = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.EBADF,
})  # fmt: skip
"""What the system refuses because of what it was asked: it would refuse it again."""


class FlowError(RailgunError):
    """A flow is not well made. Raised where it is made; names the line."""


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


class UpgradeError(StepError):
    """A function that brings saved state up to its present form raised."""

    def __str__(self) -> str:
        what = f"the saved state {self.record} of key {self.key}"
        return f"step {self.step!r}: {self.function}, one of its upgrades, raised for {what}\n{self.cause.rstrip()}"


class SourceError(StepError):
    """A source could not be opened or read."""

    def __str__(self) -> str:
        part = f"part {self.key} at position {self.record}"
        return f"source {self.step!r}: {self.function} failed for {part}\n{self.cause.rstrip()}"


class SinkError(StepError):
    """A sink did not take what it was given."""

    def __str__(self) -> str:
        what = f" for items that begin with {self.record}" if self.record else ""
        return f"sink {self.step!r}: {self.function} failed{what}\n{self.cause.rstrip()}"


def may_pass(error: BaseException | None) -> bool:
    """Whether a source's or sink's error comes from outside, and may be gone at the next try.

    >>> may_pass(OSError(errno.ENOSPC, "no space left")), may_pass(PermissionError(errno.EACCES, "no"))
    (True, False)
    >>> may_pass(TimeoutError("no answer")), may_pass(TypeError("not JSON"))
    (True, False)
    """
    while error is not None:
        if isinstance(error, OSError):
            return error.errno not in LASTING
        error = error.__cause__
    return False


def would_come_again(error: BaseException, saves: bool) -> bool:
    """Whether to go back would lead to the same error; to the very start, which is not saved, nobody goes for it."""
    return isinstance(error, StepError) and not (error.passing and saves)
