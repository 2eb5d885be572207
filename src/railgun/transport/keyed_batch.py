"""The interface of a batch that is sent between workers, as links, distributors and stages see it.

`RowBatch` is the only implementation; one of Arrow tables is to follow. Only operators access the records themselves.
"""

from __future__ import annotations

from typing import Final, Protocol

from railgun.engine.protocol.batch import Batch
from railgun.transport.columns import DecodingError
from railgun.transport.rows import RowBatch


class WireBatch(Batch, Protocol):
    """A batch of keyed records that can be sent to another worker."""

    port: int
    """The port of the stage that receives the batch."""

    def encode(self) -> bytes:
        """Return the batch as bytes, for `decode` of the same class."""
        ...


_ROWS: Final = b"r"


def encode_batch(batch: Batch) -> bytes:
    """Return any batch as bytes: one byte for its kind, then `WireBatch.encode`."""
    assert isinstance(batch, RowBatch)
    return _ROWS + batch.encode()


def decode_batch(data: memoryview) -> WireBatch:
    """Decode a batch of any kind; raise `DecodingError` if it is malformed."""
    if bytes(data[:1]) != _ROWS:
        raise DecodingError(f"there is no kind of batch {bytes(data[:1])!r}")
    return RowBatch.decode(data[1:])
