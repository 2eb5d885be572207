"""Encode and decode the batches that a connector sends, in columns: the blob of a `Messages` frame.

Little endian::

    u32  count    of messages
    u32  flags    1: they have times, 2: they have keys
    i64  ids      one per message
    i64  times    µs since 1970, if there are any
    u32  ends     of the payloads, one per message; then of the keys, if there are any
         keys, payloads: each column in one piece

A key is text. A message without a key, in a batch with keys, has the byte FF, which no UTF-8 text contains.
Any bytes are either a batch or raise a `BatchError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from railgun.transport.records import BatchError

VERSION: Final = 1
LARGEST: Final = 1 << 20
"""The most bytes of a frame."""
MAX_MESSAGES: Final = 5_000
"""The most messages of a batch. Limited because a message that cannot be decoded takes long to handle."""
LONGEST_NAME: Final = 1_000
"""The most bytes of a stream's name."""
FRAME_COST: Final = 64
"""Credits that a frame costs besides its bytes: even an empty frame, or the end of a stream, takes work."""
EARLIEST: Final = -62_135_596_800_000_000
LATEST: Final = 253_402_300_799_999_999
"""The range of message times (µs): from the year 1 to the year 9999."""
TIMES: Final = 1
KEYS: Final = 2
_HEAD: Final = struct.Struct("<II")
_NO_KEY: Final = b"\xff"


class Pushed(NamedTuple):
    """A decoded batch of messages."""

    ids: NDArray[np.int64]
    times: NDArray[np.int64] | None
    keys: list[str | None] | None
    payloads: list[bytes]


def pack(
    ids: Sequence[int] | NDArray[np.int64],
    payloads: Sequence[bytes],
    times: Sequence[int] | None = None,
    keys: Sequence[str | None] | None = None,
) -> bytes:
    """Return a batch as bytes.

    >>> unpack(pack([1, 2], [b"a", b"bc"], keys=["ada", None])).payloads
    [b'a', b'bc']
    """
    count = len(ids)
    flags = TIMES * (times is not None) | KEYS * (keys is not None)
    parts: list[bytes] = [_HEAD.pack(count, flags), np.array(ids, "<i8").tobytes()]
    if times is not None:
        parts.append(np.array(times, "<i8").tobytes())
    parts.append(_ends(payloads))
    if keys is not None:
        texts = [_NO_KEY if key is None else key.encode() for key in keys]
        parts += [_ends(texts), *texts]
    parts += payloads
    return b"".join(parts)


def _ends(column: Sequence[bytes]) -> bytes:
    return np.cumsum(np.fromiter(map(len, column), np.int64, len(column))).astype("<u4").tobytes()


def ids_of(blob: bytes) -> NDArray[np.int64]:
    """Return the ids of a batch that `pack` has made; it is not validated.

    >>> ids_of(pack([1, 2], [b"a", b"bc"])).tolist()
    [1, 2]
    """
    return np.frombuffer(blob, "<i8", _HEAD.unpack_from(blob)[0], _HEAD.size)


def unpack(blob: bytes | bytearray | memoryview) -> Pushed:
    """Decode a batch; raise `BatchError` if the bytes are none."""
    try:
        count, flags = _HEAD.unpack_from(blob)
        if not 0 < count <= MAX_MESSAGES or flags & ~(TIMES | KEYS):
            raise BatchError(
                f"a batch of {count} messages (1 to {MAX_MESSAGES}), with flags {flags}"
            )
        at = _HEAD.size
        ids = np.frombuffer(blob, "<i8", count, at)
        at += 8 * count
        times = None
        if flags & TIMES:
            times = np.frombuffer(blob, "<i8", count, at)
            at += 8 * count
        ends = np.frombuffer(blob, "<u4", count, at)
        at += 4 * count
        keys = None
        if flags & KEYS:
            key_ends = np.frombuffer(blob, "<u4", count, at)
            at += 4 * count
            texts = _split(blob, key_ends, at)
            at += int(key_ends[-1])
            keys = [None if text == _NO_KEY else text.decode() for text in texts]
    except (struct.error, ValueError) as error:
        if isinstance(error, BatchError):
            raise
        raise BatchError(f"no batch of messages: {error}") from error
    if at + int(ends[-1]) != len(blob):
        raise BatchError(f"{len(blob)} bytes, of which the columns fill {at + int(ends[-1])}")
    return Pushed(ids, times, keys, _split(blob, ends, at))


def _split(blob: bytes | bytearray | memoryview, ends: NDArray[Any], at: int) -> list[bytes]:
    stops: list[int] = ends.tolist()
    column = bytes(memoryview(blob)[at : at + stops[-1]])
    if len(column) < stops[-1] or (len(stops) > 1 and bool((ends[1:] < ends[:-1]).any())):
        raise BatchError("the ends of a column are not in order, or beyond the batch")
    return list(map(column.__getitem__, map(slice, [0, *stops[:-1]], stops)))
