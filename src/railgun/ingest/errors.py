"""Errors of programs outside of a flow: those that push streams into it, and sinks. `code` is for programs."""

from __future__ import annotations

from railgun.errors import RailgunError


class FeedError(RailgunError):
    """A stream cannot be sent."""


class NoFlowError(FeedError):
    """The flow does not run, accepts no streams, or does not answer. This may be transient."""


class TokenError(FeedError):
    """A job does not accept the token."""


class SourceError(FeedError):
    """A flow has no source of this name, or several sources and none was named."""


class RefusedError(FeedError):
    """A worker has ended the session: `code` says why, `stream` and `id` for which message."""

    def __init__(self, code: str, text: str, stream: str = "", id: int | None = None) -> None:
        super().__init__(f"{text} ({code})")
        self.code, self.stream, self.id = code, stream, id


class RewindError(FeedError):
    """The flow has gone back to a position before its acknowledgements, and the messages are no longer kept."""


class TooLargeError(FeedError):
    """A message is larger than the largest frame."""


class SinkError(RailgunError):
    """A sink cannot do what was requested."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class LostError(SinkError):
    """The output to be committed is missing or incomplete."""


class MisuseError(SinkError):
    """A client of a sink violates the protocol: its session ends."""
