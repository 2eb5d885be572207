"""What can go wrong for a client. Each has a `code`: the node's own, or one of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from railgun.errors import RailgunError
from railgun.transport import error_codes as codes

DAMAGED: Final = "LOG_DAMAGED"


class StreamsError(RailgunError):
    """A node refused, or could not be reached. `code` says what for: see docs/design/wire.md."""

    def __init__(self, code: str, text: str, no_quorum: bool = False) -> None:
        super().__init__(f"{text} ({code})" if text else code)
        self.code = code
        self.text = text
        self.no_quorum = no_quorum
        """Whether the node that refused has known no leader for a while."""

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later."""
        return codes.may_pass(self.code)

    @property
    def nothing_done(self) -> bool:
        """Whether the request is known to have had no effect."""
        return codes.nothing_done(self.code)


class DuplicateIdError(StreamsError):
    """A message with this ID is there already, at `offset`; nothing was stored."""

    def __init__(self, text: str, offset: int) -> None:
        super().__init__("DUPLICATE_ID", text)
        self.offset = offset


class DeadlineError(StreamsError, TimeoutError):
    """It was not done in time. What was published may be stored or not: with an ID it can be published again."""

    def __init__(self, text: str) -> None:
        super().__init__("DEADLINE", text)


class NoNodeError(StreamsError, ConnectionError):
    """There is no node there, or none that knows this secret."""

    def __init__(self, text: str) -> None:
        super().__init__("NO_NODE", text)


class SubscriptionLostError(StreamsError):
    """The node has ended a subscription: nothing more comes, and prefetched messages are not given.

    `code` says why: `CONSUMER_TAKEN` (another subscription has the ID of this tracked consumer), `NO_STREAM` (the
    stream was deleted), `NO_GROUP` (the group was deleted), `STREAM_REPLACED`, or why the node cannot serve it.
    """


class StreamDamagedError(StreamsError):
    """The log of a stream is damaged: nothing from an offset on can be read. The text names both.

    All before that offset was given; what was delivered to a group may still be acknowledged.
    """

    def __init__(self, text: str) -> None:
        super().__init__(DAMAGED, text)


def refuse_damaged(described: Mapping[str, Any]) -> None:
    """Raise `StreamDamagedError` if `described` (what `describe` tells) is of a stream that ends in damage.

    For whoever reads up to `described["end"]`, and would take it for the end of the stream.
    """
    if described.get("damaged_at") is not None:
        raise StreamDamagedError(str(described["trouble"]))


class NoAnswerError(StreamsError):
    """Nobody answered a request: NO_CONSUMERS, CONSUMERS_BUSY or RS_TIMEOUT."""
