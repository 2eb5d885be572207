"""Encode and decode frames: a command and a blob of bytes, between a program outside and a node, worker or sink.

A frame, little endian::

    0  u32  size     of everything that follows
    4  u32  channel  of a subscription; 0: none
    8  u32  kind     the number of the command (`KINDS`)
    12 u32  length   of the command
    16      the command, as protobuf (`proto/*.proto`)
            the blob: record batches, or nothing

Rules:

1. Any bytes are either frames or raise a `FrameError`, which ends the connection.
2. A frame larger than the agreed limit is refused as soon as its size has arrived, before its bytes.
3. A blob is a separate copy, which may be changed: the node writes offsets into it.
   The rest of a large frame is read directly into its own buffer, without copying, if the reader calls `room`.
4. A frame that is only forwarded is not decoded: only the head of a `RawFrame` is read, until `command` or `frame` is
   called.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from railgun.errors import RailgunError
from railgun.transport.proto import cluster_pb2 as n
from railgun.transport.proto import connectors_pb2 as c
from railgun.transport.proto import raft_pb2 as r
from railgun.transport.proto import sinks_pb2 as s
from railgun.transport.proto import streams_pb2 as p

VERSION: Final = 1
LARGEST: Final = 8 << 20
"""The most bytes of a frame, unless the two sides agree on another limit."""
LARGE_FRAME_BYTES: Final = 64 << 10
"""A frame of at least this size that arrives in pieces gets its own buffer, which saves a copy."""
SLACK_BYTES: Final = 64 << 10
"""Bytes behind a large frame for which its buffer has room."""
_HEAD: Final = struct.Struct("<IIII")
_SIZE: Final = struct.Struct("<I")
_SHORTEST: Final = _HEAD.size - _SIZE.size
Blob: TypeAlias = bytes | bytearray | memoryview

KINDS: Final[dict[int, Any]] = {
    1: p.Ping, 2: p.Pong, 3: p.Failed, 4: p.GoingAway,
    10: p.Publish, 11: p.Published, 12: p.Respond, 13: p.Responded, 14: p.Response,
    20: p.Subscribe, 21: p.Subscribed, 22: p.Grant, 23: p.Deliver, 24: p.Ack, 25: p.Nack, 26: p.InProgress,
    27: p.Acked, 28: p.Unsubscribe, 29: p.Unsubscribed, 30: p.Missed, 31: p.Lost, 32: p.Recalled,
    40: p.Admin, 41: p.Done,
    50: c.Welcome, 51: c.Refused, 52: c.Notify, 53: c.NotifyAck, 54: c.Messages, 55: c.Ack, 56: c.Eos, 57: c.Restart,
    60: s.Begin, 61: s.Data, 62: s.Have, 63: s.Prepare, 64: s.Vote, 65: s.Commit, 66: s.Abort, 67: s.Done, 68: s.List,
    69: s.Listed,
    70: r.AskVote, 71: r.Vote, 72: r.Append, 73: r.Appended, 74: r.Install, 75: r.Installing, 76: r.Campaign,
    77: r.AskRead, 78: r.ReadAt,
    80: n.Call, 81: n.Answer, 82: n.Fence, 83: n.Fenced, 84: n.Push, 85: n.Has, 86: n.Stands, 87: n.Fetch,
    88: n.Fetched, 89: n.PushGroups, 90: n.HasGroups, 91: n.FetchGroups, 92: n.FetchedGroups,
    95: n.Interest, 96: n.Scatter, 97: n.Reserve, 98: n.Reserved, 99: n.Release, 100: n.Reply, 101: n.Reached,
}  # fmt: skip
"""The number of each command in a frame."""
NUMBERS: Final[dict[Any, int]] = {kind: number for number, kind in KINDS.items()}
T = TypeVar("T")


class FrameError(RailgunError):
    """Bytes are no frame, or the frame is not acceptable."""

    code = "BAD_FRAME"


class Frame(NamedTuple):
    """A decoded frame."""

    channel: int
    command: Any
    blob: bytearray | memoryview


class RawFrame(NamedTuple):
    """A frame as it arrived: only its head was read.

    >>> (raw,) = FrameReader().raw(b"".join(encode(p.Ping(number=7), [b"blob"], channel=3)))
    >>> raw.channel, KINDS[raw.kind].__name__, raw.command().number, len(raw.data), raw.frame().blob
    (3, 'Ping', 7, 22, bytearray(b'blob'))
    """

    channel: int
    kind: int
    length: int
    """The number of bytes of the command."""
    data: memoryview
    """The whole frame."""

    def command(self) -> Any:
        """Decode the command, without its blob; raise `FrameError` if it is malformed."""
        return _command(self.kind, self.data[_HEAD.size : _HEAD.size + self.length])

    def frame(self) -> Frame:
        """Decode the whole frame; raise `FrameError` if it is malformed."""
        blob = self.data[_HEAD.size + self.length :]
        own = len(blob) >= LARGE_FRAME_BYTES and not blob.readonly
        return Frame(self.channel, self.command(), blob if own else bytearray(blob))

    def kept(self) -> RawFrame:
        """Return a copy that does not keep alive the buffer in which the frame arrived."""
        return self._replace(data=memoryview(bytes(self.data)))


def encode(
    command: Message, blobs: Sequence[Blob] = (), channel: int = 0, largest: int = LARGEST
) -> list[Blob]:
    """Return a frame as pieces to be written one after the other; raise `FrameError` if it exceeds `largest` bytes.

    >>> frame = b"".join(encode(p.Ping(number=7), [b"blob"], channel=3))
    >>> [(f.channel, f.command.number, bytes(f.blob)) for f in FrameReader().feed(frame)]
    [(3, 7, b'blob')]
    """
    body = command.SerializeToString()
    size = _SHORTEST + len(body) + sum(map(len, blobs))
    if size > largest:
        raise FrameError(f"a frame of {size:,} bytes: {largest:,} are the most")
    return [_HEAD.pack(size, channel, NUMBERS[type(command)], len(body)) + body, *blobs]


class FrameReader:
    """Assembles frames from bytes that arrive in pieces."""

    def __init__(self, largest: int = LARGEST) -> None:
        self.largest = largest
        self._data = bytearray()  # an incomplete small frame, or part of a size
        self._large: memoryview | None = None  # the buffer of an incomplete large frame
        self._have = 0  # bytes in that buffer
        self._need = _SIZE.size  # bytes of the incomplete frame, or of its size

    @property
    def begun(self) -> int:
        """The number of bytes received of an incomplete frame."""
        return len(self._data) if self._large is None else self._have

    @property
    def missing(self) -> int:
        """The number of bytes missing from an incomplete frame, or from its size if that is incomplete."""
        return max(0, self._need - self.begun)

    def room(self) -> memoryview | None:
        """Return the buffer for the rest of a large frame, or None if none has begun.

        The caller reads into the buffer, calls `filled` with the number of bytes, and then `feed(b"")`. The buffer has
        some slack: a read that fills its buffer completely looks as if there were much more to come.
        """
        if self._large is None or self._have >= self._need:
            return None
        return self._large[self._have :]

    def filled(self, count: int) -> None:
        """Note that `count` bytes were read into the buffer that `room` returned."""
        self._have += count

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes; raise `FrameError` if the bytes are no frames."""
        return self._each(data, _decode, _decode_owned)

    def raw(self, data: bytes) -> Iterator[RawFrame]:
        """Yield the frames that `data` completes, without decoding them; raise `FrameError` as `feed`."""
        return self._each(data, _head, lambda own: _head(own, 0, len(own) - _SIZE.size))

    def _each(
        self,
        data: bytes,
        decode_at: Callable[[bytes | bytearray, int, int], T],
        decode_whole: Callable[[memoryview], T],
    ) -> Iterator[T]:
        whole: bytes | bytearray = data  # complete frames are not copied
        if self._large is not None:
            large, end, part = self._large, self._need, data[: self.missing]
            large[self._have : self._have + len(part)] = part
            self._have += len(part)
            if self._have < end:
                return
            whole = bytes(large[end : self._have]) + data[len(part) :]
            self._large, self._need = None, _SIZE.size
            try:
                yield decode_whole(large[:end])
            except GeneratorExit:
                self._data += whole
                raise
        elif self._data:
            self._data += data
            if len(self._data) < self._need:
                return
            whole, self._data = self._data, bytearray()
        at, length = 0, len(whole)
        try:
            while length - at >= _SIZE.size:
                (size,) = _SIZE.unpack_from(whole, at)
                if not _SHORTEST <= size <= self.largest:
                    raise FrameError(
                        f"a frame of {size:,} bytes: between {_SHORTEST} and {self.largest:,} are acceptable"
                    )
                if length - at < _SIZE.size + size:
                    self._need = _SIZE.size + size
                    if self._need >= LARGE_FRAME_BYTES:
                        self._large, self._have = _allocate(self._need + SLACK_BYTES), length - at
                        self._large[: self._have] = whole[at:]
                        at = length
                    break
                frame = decode_at(whole, at, size)
                at += _SIZE.size + size
                self._need = _SIZE.size
                yield frame
        finally:
            if at < length:
                self._data += whole[at:]


def _head(data: Blob, at: int, size: int) -> RawFrame:
    _, channel, number, length = _HEAD.unpack_from(data, at)
    _kind(number)
    if _SHORTEST + length > size:
        raise FrameError(f"a command of {length} bytes in a frame of {size}")
    return RawFrame(channel, number, length, memoryview(data)[at : at + _SIZE.size + size])


def _decode(data: bytes | bytearray, at: int, size: int) -> Frame:
    _, channel, number, length = _HEAD.unpack_from(data, at)
    begin, end = at + _HEAD.size, at + _SIZE.size + size
    if begin + length > end:
        raise FrameError(f"a command of {length} bytes in a frame of {size}")
    command = _command(number, data[begin : begin + length])
    return tuple.__new__(
        Frame, (channel, command, bytearray(memoryview(data)[begin + length : end]))
    )


def _decode_owned(own: memoryview) -> Frame:
    """Decode a frame that fills all of these bytes: the blob is a part of them, and is not copied."""
    _, channel, number, length = _HEAD.unpack_from(own, 0)
    begin = _HEAD.size + length
    if begin > len(own):
        raise FrameError(f"a command of {length} bytes in a frame of {len(own) - _SIZE.size}")
    return Frame(channel, _command(number, own[_HEAD.size : begin]), own[begin:])


def _allocate(size: int) -> memoryview:
    """Return uninitialized memory: a peer that only announces a large frame does not use up that memory yet."""
    return np.empty(size, np.uint8).data


def _kind(number: int) -> Any:
    kind = KINDS.get(number)
    if kind is None:
        raise FrameError(f"there is no command {number}: the other side is of a later version")
    return kind


def _command(number: int, body: bytes | bytearray | memoryview) -> Any:
    kind = _kind(number)
    try:
        return kind.FromString(bytes(body))
    except DecodeError as error:
        raise FrameError(f"a command that is no {kind.__name__}: {error}") from error
