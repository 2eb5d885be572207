"""Errors of the client. Each has a `code`: one that the node sent, or one of those below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from railgun.errors import RailgunError
from railgun.transport import error_codes as codes

DAMAGED: Final = "LOG_DAMAGED"


class StreamsError(RailgunError):
    """A node refused a request, or could not be reached. `code` says why: see docs/design/wire.md."""

    def __init__(self, code: str, text: str, no_quorum: bool = False) -> None:
        super().__init__(f"{text} ({code})" if text else code)
        self.code = code
        self.text = text
        self.no_quorum = no_quorum
        """Whether the node that refused has known no leader for a while: its cluster has no quorum."""

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later."""
        return codes.may_pass(self.code)

    @property
    def nothing_done(self) -> bool:
        """Whether the request is known to have had no effect."""
        return codes.nothing_done(self.code)


class DuplicateIdError(StreamsError):
    """The stream already holds a message with this ID, at `offset`; nothing was stored."""

    def __init__(self, text: str, offset: int) -> None:
        super().__init__("DUPLICATE_ID", text)
        self.offset = offset


class DeadlineError(StreamsError, TimeoutError):
    """A call was not answered before its timeout.

    A message that was being published may be stored or not: with an ID it can be published again.
    """

    def __init__(self, text: str) -> None:
        super().__init__("DEADLINE", text)


class NoNodeError(StreamsError, ConnectionError):
    """No node listens at the address, or it does not accept the secret."""

    def __init__(self, text: str) -> None:
        super().__init__("NO_NODE", text)


class SubscriptionLostError(StreamsError):
    """The node has ended a subscription: no more messages come, and prefetched messages are dropped.

    `code` says why: `CONSUMER_TAKEN` (another subscription uses the ID of this tracked consumer), `NO_STREAM` (the
    stream was deleted), `NO_GROUP` (the group was deleted), `STREAM_REPLACED` (the stream was deleted and created
    anew), or why the node cannot serve the stream.
    """


class StreamDamagedError(StreamsError):
    """The log of a stream is damaged from an offset on, and cannot be read from there. The text names both.

    All messages before that offset were delivered; those delivered to a group may still be acknowledged.
    """

    def __init__(self, text: str) -> None:
        super().__init__(DAMAGED, text)


def refuse_damaged(described: Mapping[str, Any]) -> None:
    """Raise `StreamDamagedError` if `described` (the answer of `describe`) is of a stream whose log is damaged.

    A reader that stops at `described["end"]` must call this: it would take the damage for the end of the stream.
    """
    if described.get("damaged_at") is not None:
        raise StreamDamagedError(str(described["trouble"]))


class NoAnswerError(StreamsError):
    """No listener answered a request. `code` is NO_CONSUMERS, CONSUMERS_BUSY or RS_TIMEOUT."""
