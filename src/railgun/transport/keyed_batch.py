"""A batch that travels: what links, distributors and stages know of records.

`RowBatch` is the implementation there is; one of Arrow tables will stand beside it. Only operators look inside.
"""

from __future__ import annotations

from typing import Final, Protocol

from railgun.engine.protocol.batch import Batch
from railgun.transport.columns import DecodingError
from railgun.transport.rows import RowBatch


class WireBatch(Batch, Protocol):
    """A batch of keyed records that can be sent to another worker."""

    port: int
    """The port of the stage it is for."""

    def encode(self) -> bytes:
        """As bytes, for `decode` of the same kind."""
        ...


_ROWS: Final = b"r"


def encode_batch(batch: Batch) -> bytes:
    """Any batch as bytes: one that says of which kind it is, then its own."""
    assert isinstance(batch, RowBatch)
    return _ROWS + batch.encode()


def decode_batch(data: memoryview) -> WireBatch:
    """A batch again."""
    if bytes(data[:1]) != _ROWS:
        raise DecodingError(f"there is no kind of batch {bytes(data[:1])!r}")
    return RowBatch.decode(data[1:])
