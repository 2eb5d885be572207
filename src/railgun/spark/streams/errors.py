"""Errors between Spark and a node. Spark passes errors on as text, so the text says everything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from railgun.client.errors import StreamsError
from railgun.errors import RailgunError


class StreamSourceError(RailgunError):
    """Reading or writing a stream from Spark failed; the message names the stream, and the wrong option or column."""


class BadOptionError(StreamSourceError, ValueError):
    """An option is missing, unknown, or has a value that it cannot have."""


class BadColumnError(StreamSourceError, ValueError):
    """A column cannot be read or written like that, or a message does not fit into it."""


class MissingMessagesError(StreamSourceError):
    """Messages were deleted before they were read."""


class InDoubtError(StreamSourceError):
    """It is not known any more whether a micro-batch was published; nothing is done, because that could repeat it."""


@contextlib.contextmanager
def node_errors(doing: str) -> Iterator[None]:
    """Raise errors of the node as `StreamSourceError`, with what was being done in front."""
    try:
        yield
    except StreamsError as error:
        raise StreamSourceError(f"{doing}: {error}") from error
    except TimeoutError as error:
        raise StreamSourceError(f"{doing}: the node did not answer in time") from error
