"""What can go wrong for programs outside of a flow: those that feed it, and sinks. `code` is for programs."""

from __future__ import annotations

from railgun.errors import RailgunError


class FeedError(RailgunError):
    """A stream cannot be sent."""


class NoFlowError(FeedError):
    """There is no such flow, or it does not take streams, or nobody answers."""


class TokenError(FeedError):
    """A job does not accept the token."""


class SourceError(FeedError):
    """A flow has no such source, or several."""


class RefusedError(FeedError):
    """A worker has ended the session: `code` says what for; `stream` and `id`: for which message."""

    def __init__(self, code: str, text: str, stream: str = "", id: int | None = None) -> None:
        super().__init__(f"{text} ({code})")
        self.code, self.stream, self.id = code, stream, id


class RewindError(FeedError):
    """The flow has gone back to before what it had acknowledged, and the messages are no longer here."""


class TooLargeError(FeedError):
    """A message is larger than a frame may be."""


class SinkError(RailgunError):
    """What was asked of a sink cannot be done."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class LostError(SinkError):
    """What is to be committed is not here, or not whole."""


class MisuseError(SinkError):
    """Whoever asks does not keep to the rules: its session ends."""
