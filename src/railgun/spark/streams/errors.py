"""What goes wrong between Spark and a node. Spark passes errors on as text: the text says all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from railgun.client.errors import StreamsError
from railgun.errors import RailgunError


class StreamSourceError(RailgunError):
    """Reading or writing a stream from Spark failed; it names the stream, and the option or column to blame."""


class BadOptionError(StreamSourceError, ValueError):
    """An option that is missing, is not known, or has a value that it cannot have."""


class BadColumnError(StreamSourceError, ValueError):
    """A column that cannot be read or written so, or a message that does not fit into it."""


class MissingMessagesError(StreamSourceError):
    """Messages that were to be read were deleted before."""


class InDoubtError(StreamSourceError):
    """Nobody knows any more whether a micro-batch was published: nothing is done, for it could be twice."""


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """What a node refuses, or that there is none, is told with what was being done."""
    try:
        yield
    except StreamsError as error:
        raise StreamSourceError(f"{what}: {error}") from error
    except TimeoutError as error:
        raise StreamSourceError(f"{what}: the node did not answer in time") from error
