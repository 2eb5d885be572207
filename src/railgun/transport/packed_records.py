"""Encode the records that are sent to a sink outside of a flow: each behind its length (u32, little endian)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

_LENGTH: Final = struct.Struct("<I")
LENGTH_BYTES: Final = _LENGTH.size
"""The number of bytes of the length before each record."""


def pack(records: Sequence[bytes]) -> bytes:
    """Return the records as bytes.

    >>> unpack(pack([b"one", b"", b"three"]))
    [b'one', b'', b'three']
    """
    pieces: list[bytes] = []
    for record in records:
        pieces += (_LENGTH.pack(len(record)), record)
    return b"".join(pieces)


def unpack(data: bytes) -> list[bytes]:
    """Return the records in `data`; raise `ValueError` if it is malformed."""
    records: list[bytes] = []
    at = 0
    while at < len(data):
        if len(data) - at < _LENGTH.size:
            raise ValueError(f"{len(data) - at} bytes are left after the last record")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if len(data) - at < length:
            raise ValueError(f"a record of {length:,} bytes, of which {len(data) - at:,} are there")
        records.append(data[at : at + length])
        at += length
    return records
