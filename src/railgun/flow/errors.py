"""What can be wrong with a flow, and with a record in one."""

from __future__ import annotations

from railgun.core.errors import RailgunError


class FlowError(RailgunError):
    """A flow is not well made. Raised where it is made; names the line."""


class StepError(RailgunError):
    """A user's function raised for a record, and its step's policy is to stop."""

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
