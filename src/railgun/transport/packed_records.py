"""Records on their way to a sink outside of a flow: each with its length (u32, little endian) before it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

_LENGTH: Final = struct.Struct("<I")
BEFORE: Final = _LENGTH.size
"""Bytes before each record."""


def pack(records: Sequence[bytes]) -> bytes:
    """Records as bytes.

    >>> unpack(pack([b"one", b"", b"three"]))
    [b'one', b'', b'three']
    """
    pieces: list[bytes] = []
    for record in records:
        pieces += (_LENGTH.pack(len(record)), record)
    return b"".join(pieces)


def unpack(data: bytes) -> list[bytes]:
    """The records; `ValueError` if they are none."""
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
