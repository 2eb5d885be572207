"""Record batches: many messages as one block of bytes, the same on the wire and on disk.

A client builds a batch, the node writes offset, epoch and time into its header, and from then on the same bytes are
stored, replicated and delivered. Single messages are not touched on that way.

A batch, little endian::

     0  4s   b"RGB1"
     4  u32  size        of the whole batch, this header included
     8  u32  head crc    crc32 of bytes 12 to 64; set by the last writer of the header
    12  u32  body crc    crc32 of bytes 64 to the end; set by the builder of the batch
    16  u64  base        offset of the first message
    24  u64  epoch       of the master that assigned the offset
    32  i64  time        microseconds since 1970, when it was stored
    40  u32  count       of messages
    44  u16  flags       1: it has IDs, 2: it has headers; 4: its unit continues in the next batch, 8: it ends a commit,
                         16: it is staged; 8 beside 16: a copy of all that was staged before for its sequence
                         begins with it
    46  u16  zero
    48  u64  producer    of the commit that this batch ends, or that staged it, by its number in the stream; 0: none
    56  u64  number      of that commit, or of the sequence for which it is staged
    64  u32  ends of the payloads, one per message; then of the IDs and of the headers, if there are any
             IDs, headers, payloads, each column in one piece

Rules:

1. An end counts from the start of its column, and is not below the end before it. The last ends fill the batch exactly.
2. A batch has at least one message. An ID has at most 255 bytes, and an empty ID means none. Headers are bytes that are
   not interpreted here; by convention a JSON object of strings.
3. A body never changes. `build` and `cut` make batches; headers change only by `patch`, `unite` and `mark`.
4. Later versions keep the first three bytes, the size, and the place of the header's checksum, which then covers the
   four bytes of the version first. So a batch of a later version differs from a damaged one: its checksum fits
   (`LaterBatchError`). A version that does not keep this is recognized by its fourth byte, a higher digit (`is_later`),
   unless that may be a flipped bit of ours: recovery refuses to cut such bytes off (`broker.log.recovery`).
5. Any bytes are either a batch or raise a `BatchError`. `head` validates the header, `Records` also the ends, `check`
   every byte: a batch from elsewhere is checked before it is stored.
6. Ranges are half-open: the first offset is included, the end excluded. Before the node assigns offsets, they count
   from 0.
7. A *unit* becomes visible as a whole or not at all: consecutive batches, all but the last of which have the flag 4.
   Nodes make units (`unite`); readers need not know them. A batch from a client must not have the flag (`check`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from zlib_ng.zlib_ng import crc32

from railgun.errors import LaterVersionError, RailgunError

MAGIC: Final = b"RGB1"
HEADER: Final = 64
LARGEST: Final = 1 << 30
"""The most bytes of a batch."""
MAX_ID_BYTES: Final = 255
HAS_IDS: Final = 1
HAS_HEADERS: Final = 2
CONTINUES: Final = 4
"""The flag of a batch whose unit continues in the next batch."""
COMMITS: Final = 8
"""The flag of a batch that ends a commit, and names its producer and number."""
STAGED: Final = 16
"""The flag of a batch that is staged for a commit, and names its producer and sequence."""

ANEW: Final = COMMITS
"""The flag, beside `STAGED`, of a batch with which a copy of all that was staged for its sequence begins."""

_HEAD: Final = struct.Struct("<4sIIIQQqIHHQQ")
_PATCHED: Final = struct.Struct("<QQq")
_UNITED: Final = struct.Struct("<HHQQ")
_COLUMN_FLAGS: Final = HAS_IDS | HAS_HEADERS
_NAMED: Final = COMMITS | STAGED
_FLAGS: Final = _COLUMN_FLAGS | CONTINUES | _NAMED
_U32: Final = struct.Struct("<I")
_LAST_OFFSET: Final = 1 << 63
_SMALL_COUNT: Final = 16  # up to so many values, numpy is slower than a loop in C

Bytes: TypeAlias = bytes | bytearray | memoryview
Ends: TypeAlias = npt.NDArray[np.uint32]
Column: TypeAlias = tuple[Ends, memoryview]
"""The ends of all values, and the values' bytes one after the other."""


class BatchError(RailgunError, ValueError):
    """Bytes are no record batch, or messages cannot form one."""


class LaterBatchError(BatchError, LaterVersionError):
    """A batch of a later version: its header is intact, and has a version, flags or fields that are unknown here."""


class ShortBatchError(BatchError):
    """The bytes end before the batch does: the rest may still arrive."""


class Head(NamedTuple):
    """The header of a batch."""

    size: int
    body_crc: int
    base: int
    epoch: int
    time: int
    count: int  # type: ignore[assignment]
    flags: int
    producer: int = 0
    number: int = 0

    @property
    def end(self) -> int:
        """The offset behind the last message."""
        return self.base + self.count


def build(
    payloads: Sequence[bytes],
    ids: Sequence[bytes | None] | None = None,
    headers: Sequence[bytes | None] | None = None,
) -> bytearray:
    """Build a batch of these messages, with offsets from 0 until it is patched.

    `ids` and `headers`: a value or None for each message. Raises `BatchError` if the messages cannot form a batch.

    >>> batch = build([b"first", b"second"], ids=[b"a", None])
    >>> patch(batch, base=7, epoch=1, time=1_000)
    >>> records = Records(batch)
    >>> records.base, records.payloads(), records.ids()
    (7, [b'first', b'second'], [b'a', None])
    """
    count = len(payloads)
    if not count:
        raise BatchError("a batch has at least one message; publish nothing instead of none")
    table, total = _ends("payload", payloads)
    flags, size, pieces = 0, HEADER + 4 * count + total, [bytes(HEADER), table]
    columns: list[Sequence[bytes]] = []
    for name, flag, values in (("ID", HAS_IDS, ids), ("header", HAS_HEADERS, headers)):
        if values is None:
            continue
        if len(values) != count:
            raise BatchError(f"{count} payloads, but {len(values)} {name}s: give one for each")
        column = (
            [value or b"" for value in values]
            if None in values
            else cast("Sequence[bytes]", values)
        )
        table, total = _ends(name, column)
        if not total:
            continue  # all values are empty: the same as no column
        if flag == HAS_IDS and (longest := max(map(len, column))) > MAX_ID_BYTES:
            at = next(n for n, value in enumerate(column) if len(value) == longest)
            raise BatchError(
                f"the ID of message {at} has {longest} bytes; {MAX_ID_BYTES} are the most"
            )
        flags |= flag
        size += 4 * count + total
        pieces.append(table)
        columns.append(column)
    for column in columns:
        pieces += column
    pieces += payloads
    try:
        batch = bytearray().join(pieces)
    except TypeError as error:
        raise BatchError(f"payloads, IDs and headers are bytes: {error}") from error
    if len(batch) != size:
        raise BatchError("payloads, IDs and headers are bytes, not views of larger items")
    if size > LARGEST:
        raise _too_large(size)
    body = crc32(memoryview(batch)[HEADER:])
    _HEAD.pack_into(batch, 0, MAGIC, size, 0, body, 0, 0, 0, count, flags, 0, 0, 0)
    patch(batch, 0, 0, 0)
    return batch


def _ends(name: str, column: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the table of ends of a column, and the last end."""
    count = len(column)
    try:
        if count <= _SMALL_COUNT:
            small = list(accumulate(map(len, column)))
            total = small[-1]
        else:
            large = np.cumsum(np.fromiter(map(len, column), np.int64, count))
            total = int(large[-1])
    except TypeError as error:
        raise BatchError(f"a {name} is not bytes: {error}") from error
    if total > LARGEST:
        raise _too_large(total)
    return struct.pack(f"<{count}I", *small) if count <= _SMALL_COUNT else large.astype(
        "<u4"
    ).tobytes(), total


def _too_large(size: int) -> BatchError:
    return BatchError(f"a batch of {size:,} bytes; {LARGEST:,} are the most: build smaller ones")


def patch(batch: bytearray | memoryview, base: int, epoch: int, time: int) -> None:
    """Write offset, epoch and time into the header of a batch that was validated before."""
    if len(batch) < HEADER:
        raise ShortBatchError(f"{len(batch)} bytes cannot be patched: a header has {HEADER}")
    if not 0 <= base < _LAST_OFFSET or not 0 <= epoch < 1 << 64 or not -1 << 63 <= time < 1 << 63:
        raise BatchError(f"no batch has base {base}, epoch {epoch}, time {time}")
    _PATCHED.pack_into(batch, 16, base, epoch, time)
    _U32.pack_into(batch, 8, crc32(batch[12:HEADER]))


def unite(batches: Sequence[bytearray], producer: int = 0, commit: int = 0) -> None:
    """Make one unit of these batches, which were validated before; with a producer, the unit is a commit of it.

    >>> batches = [build([b"a"]), build([b"b"])]
    >>> unite(batches, producer=3, commit=17)
    >>> [(head(batch).flags, head(batch).producer, head(batch).number) for batch in batches]
    [(4, 0, 0), (8, 3, 17)]
    """
    for batch in batches[:-1]:
        mark(batch, CONTINUES)
    mark(batches[-1], COMMITS if producer else 0, producer, commit)


def mark(batch: bytearray, flag: int, producer: int = 0, number: int = 0) -> None:
    """Set the flag (or none: 0), producer and number of a batch that was validated before; only nodes do this."""
    columns = head(batch).flags & _COLUMN_FLAGS
    _UNITED.pack_into(batch, 44, columns | flag, 0, producer, number)
    _U32.pack_into(batch, 8, crc32(batch[12:HEADER]))


def head(data: Bytes, at: int = 0) -> Head:
    """Return the header of the batch that begins at byte `at`. The body may be missing.

    Raises `ShortBatchError` if the header is incomplete, `LaterBatchError` for a later version, else `BatchError`.

    >>> head(build([b"hello"])).count
    1
    >>> head(b"GET / HTTP/1.1" + bytes(50))
    Traceback (most recent call last):
    railgun.transport.records.BatchError: no record batch at byte 0: it begins with b'GET ', not with b'RGB1'
    """
    if len(data) - at < HEADER or at < 0:
        raise ShortBatchError(f"{len(data) - at} bytes at byte {at}: a header has {HEADER}")
    (magic, size, crc, body, base, epoch, time, count, flags, zero, producer, number) = (
        _HEAD.unpack_from(data, at)
    )
    if magic != MAGIC:
        fits = magic[:3] == MAGIC[:3] and crc32(data[at + 12 : at + HEADER], crc32(magic)) == crc
        if fits or is_later(MAGIC, magic, certain=True):
            raise LaterBatchError(f"the batch at byte {at} has a later version: {magic!r}")
        raise BatchError(
            f"no record batch at byte {at}: it begins with {magic!r}, not with {MAGIC!r}"
        )
    if crc32(data[at + 12 : at + HEADER]) != crc:
        raise BatchError(f"the header of the batch at byte {at} is damaged: its checksum differs")
    if zero or flags & ~_FLAGS or ((producer or number) and not flags & _NAMED):
        raise LaterBatchError(
            f"the batch at byte {at} has fields of a later version (flags {flags})"
        )
    least = HEADER + 4 * count * (1 + (flags & 1) + (flags >> 1 & 1))
    if not count or not least <= size <= LARGEST or base + count > _LAST_OFFSET:
        raise BatchError(
            f"the header of the batch at byte {at} is invalid: {count} messages from {base}, {size} bytes"
        )
    return tuple.__new__(Head, (size, body, base, epoch, time, count, flags, producer, number))


def is_later(own: bytes, magic: Bytes, *, certain: bool = False) -> bool:
    """Return whether the four bytes `magic` name a later version of `own`: the same family, and a higher digit.

    `certain`: only if a single flipped bit of `own` cannot explain them.

    >>> [is_later(b"RGB1", magic) for magic in (b"RGB2", b"RGB3", b"RGB1", b"RGB0", b"RGBq", b"RGG2", b"RGB")]
    [True, True, False, False, False, False, False]
    >>> [is_later(b"RGB1", magic, certain=True) for magic in (b"RGB2", b"RGB3")]
    [True, False]
    """
    if len(magic) < 4 or bytes(magic[:3]) != own[:3] or not own[3] < magic[3] <= ord("9"):
        return False
    return not certain or (magic[3] ^ own[3]).bit_count() > 1


def check(batch: Bytes) -> Head:
    """Validate every byte of one complete batch of a client: checksums, ends, lengths. Return its header."""
    header = _whole(batch)
    if header.flags & ~_COLUMN_FLAGS:
        raise BatchError(f"the batch of {header.count} messages has flags that only nodes set")
    _summed(batch, header)
    _Columns(batch, header)
    return header


def _summed(batch: Bytes, header: Head) -> None:
    if crc32(memoryview(batch)[HEADER:]) != header.body_crc:
        raise BatchError(
            f"the batch of {header.count} messages from {header.base} is damaged: its checksum differs"
        )


def split(data: Bytes) -> list[memoryview]:
    """Return the batches that follow one another in `data`; only their headers are validated.

    >>> [head(batch).count for batch in split(build([b"a", b"b"]) + build([b"c"]))]
    [2, 1]
    """
    return [batch for _, batch in _each(data)]


def intact(data: Bytes) -> list[tuple[Head, memoryview]]:
    """Return batches with their headers, as `split`; verify the checksums of batches that were checked before."""
    batches = list(_each(data))
    for header, batch in batches:
        _summed(batch, header)
    return batches


def _each(data: Bytes) -> Iterator[tuple[Head, memoryview]]:
    view, at = memoryview(data), 0
    while at < len(view):
        header = head(view, at)
        if at + header.size > len(view):
            raise ShortBatchError(
                f"{len(view) - at} bytes at byte {at}: the batch has {header.size}"
            )
        yield header, view[at : at + header.size]
        at += header.size


def cut(batch: Bytes, first: int, end: int) -> Bytes:
    """Return a batch of the messages from offset `first` up to `end`; the same bytes if that is all of them.

    >>> batch = build([b"a", b"b", b"c"])
    >>> patch(batch, base=10, epoch=1, time=5)
    >>> records = Records(cut(batch, 11, 13))
    >>> records.base, records.time, records.payloads()
    (11, 5, [b'b', b'c'])
    """
    header = _whole(batch)
    if not header.base <= first < end <= header.end:
        raise BatchError(
            f"messages {first} to {end} cannot be cut from the batch of {header.base} to {header.end}"
        )
    if first == header.base and end == header.end:
        return batch
    columns, view = _Columns(batch, header), memoryview(batch)
    low, high = first - header.base, end - header.base
    tables: list[bytes] = []
    slices: list[memoryview] = []
    flags = 0
    for flag, ends, start in columns.each():
        begin = int(ends[low - 1]) if low else 0
        stop = int(ends[high - 1])
        if flag and begin == stop:
            continue
        flags |= flag
        tables.append((ends[low:high] - np.uint32(begin)).astype("<u4").tobytes())
        slices.append(view[start + begin : start + stop])
    slices = [*slices[1:], slices[0]]
    piece = bytearray().join([bytes(HEADER), *tables, *slices])
    body = crc32(memoryview(piece)[HEADER:])
    named = (0, 0)
    if end == header.end:  # it still ends the commit or unit that the whole batch ends
        flags |= header.flags & ~_COLUMN_FLAGS
        named = header.producer, header.number
    fields = (len(piece), 0, body, 0, 0, 0, high - low, flags, 0, *named)
    _HEAD.pack_into(piece, 0, MAGIC, *fields)
    patch(piece, first, header.epoch, header.time)
    return piece


def _whole(batch: Bytes) -> Head:
    header = head(batch)
    if len(batch) < header.size:
        raise ShortBatchError(f"{len(batch)} bytes: the batch has {header.size}")
    if len(batch) > header.size:
        raise BatchError(f"{len(batch)} bytes: the batch has {header.size}, something follows it")
    return header


class _Columns:
    """The places of a batch's columns. Raises `BatchError` if the ends do not fill the batch."""

    __slots__ = ("headers", "headers_at", "ids", "ids_at", "payloads", "payloads_at")

    def __init__(self, batch: Bytes, header: Head) -> None:
        at, count = HEADER, header.count
        self.payloads: Ends = np.frombuffer(batch, "<u4", count, at)
        self.ids: Ends | None = None
        self.headers: Ends | None = None
        at += 4 * count
        if header.flags & HAS_IDS:
            self.ids = np.frombuffer(batch, "<u4", count, at)
            at += 4 * count
        if header.flags & HAS_HEADERS:
            self.headers = np.frombuffer(batch, "<u4", count, at)
            at += 4 * count
        self.ids_at = at
        self.headers_at = at + (int(self.ids[-1]) if self.ids is not None else 0)
        self.payloads_at = self.headers_at
        if self.headers is not None:
            self.payloads_at += int(self.headers[-1])
        if self.payloads_at + int(self.payloads[-1]) != header.size:
            raise BatchError(
                f"the columns of the batch from {header.base} do not fill its {header.size} bytes"
            )
        for _, ends, _ in self.each():
            if count > 1 and bool((ends[1:] < ends[:-1]).any()):
                raise BatchError(f"the ends in the batch from {header.base} are not in order")
        if self.ids is not None:
            longest = int(self.ids[0])
            if count > 1:
                longest = max(longest, int((self.ids[1:] - self.ids[:-1]).max()))
            if longest > MAX_ID_BYTES:
                raise BatchError(
                    f"an ID in the batch from {header.base} is longer than {MAX_ID_BYTES} bytes"
                )

    def each(self) -> Iterator[tuple[int, Ends, int]]:
        """Yield the flag of each column, its ends, and where it starts, in the order of their ends."""
        yield 0, self.payloads, self.payloads_at
        if self.ids is not None:
            yield HAS_IDS, self.ids, self.ids_at
        if self.headers is not None:
            yield HAS_HEADERS, self.headers, self.headers_at


class Records:
    """The messages of one complete batch. The ends are validated, the checksum is not: see `check`."""

    __slots__ = ("_columns", "_view", "head")

    def __init__(self, batch: Bytes) -> None:
        self.head = _whole(batch)
        self._columns = _Columns(batch, self.head)
        self._view = memoryview(batch)

    def __len__(self) -> int:
        return self.head.count

    @property
    def count(self) -> int:
        """The number of messages."""
        return self.head.count

    @property
    def base(self) -> int:
        """The offset of the first message."""
        return self.head.base

    @property
    def end(self) -> int:
        """The offset behind the last message."""
        return self.head.end

    @property
    def epoch(self) -> int:
        """The epoch of the master that assigned the offsets."""
        return self.head.epoch

    @property
    def time(self) -> int:
        """The time at which the batch was stored, in microseconds since 1970."""
        return self.head.time

    def payload(self, index: int) -> bytes:
        """Return the payload of a message; `index` counts from 0 in this batch."""
        return self._one(self._columns.payloads, self._columns.payloads_at, index)

    def id(self, index: int) -> bytes | None:
        """Return the ID of a message; None if it has none."""
        ends = self._columns.ids
        return None if ends is None else self._one(ends, self._columns.ids_at, index) or None

    def headers(self, index: int) -> bytes:
        """Return the headers of a message; empty if it has none."""
        ends = self._columns.headers
        return b"" if ends is None else self._one(ends, self._columns.headers_at, index)

    def payloads(self) -> list[bytes]:
        """Return the payloads of all messages."""
        return self._all(self._columns.payloads, self._columns.payloads_at)

    def ids(self) -> list[bytes | None]:
        """Return the IDs of all messages; None for a message without one."""
        if self._columns.ids is None:
            return [None] * self.count
        return [value or None for value in self._all(self._columns.ids, self._columns.ids_at)]

    @property
    def has_ids(self) -> bool:
        """Whether any message has an ID."""
        return self._columns.ids is not None

    def all_headers(self) -> list[bytes]:
        """Return the headers of all messages; empty for a message without any."""
        if self._columns.headers is None:
            return [b""] * self.count
        return self._all(self._columns.headers, self._columns.headers_at)

    def payload_column(self) -> Column:
        """Return the payloads as a column, without an object for each."""
        columns = self._columns
        return columns.payloads, self._view[columns.payloads_at :]

    def id_column(self) -> Column | None:
        """Return the IDs as a column, empty for a message without one; None if there is no ID."""
        columns = self._columns
        if columns.ids is None:
            return None
        return columns.ids, self._view[columns.ids_at : columns.headers_at]

    def header_column(self) -> Column | None:
        """Return the headers as a column, empty for a message without any; None if there are no headers."""
        columns = self._columns
        if columns.headers is None:
            return None
        return columns.headers, self._view[columns.headers_at : columns.payloads_at]

    def _one(self, ends: Ends, start: int, index: int) -> bytes:
        if not 0 <= index < self.count:
            raise BatchError(f"there is no message {index} in a batch of {self.count}")
        begin = int(ends[index - 1]) if index else 0
        return bytes(self._view[start + begin : start + int(ends[index])])

    def _all(self, ends: Ends, start: int) -> list[bytes]:
        stops: list[int] = ends.tolist()
        column = bytes(self._view[start : start + stops[-1]])
        return list(map(column.__getitem__, map(slice, [0, *stops[:-1]], stops)))
