"""Encode the messages that workers send each other as frames of bytes, and decode them.

A frame is a header and a body. The header (little-endian) is::

    length u32    of the body
    kind u8       see `KINDS`
    stage u16
    generation u32

A body carries the fields of its message as fixed-size numbers, followed, for some kinds, by a payload up to its end.
`FrameReader` splits a stream of bytes into frames, however the stream is divided into pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from railgun.engine.protocol.rescale import messages as m
from railgun.transport.columns import DecodingError
from railgun.transport.keyed_batch import decode_batch, encode_batch

HEADER: Final = struct.Struct("<IBHI")
MAX_BODY_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Pressure:
    """Back-pressure: the sender has too much to do, so all sources pause (`on`), or may go on."""

    on: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """The sender has processed so many bytes of moved state, so there is room for more."""

    size: int


Message = m.Message | Pressure | Taken
"""`Pressure` and `Taken` are for the process; the other messages are for a stage's distributor."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A message with the generation and the stage it is for."""

    generation: int
    stage: int
    message: Message


_EPOCH: Final = struct.Struct("<I")
_EPOCH_NUMBER: Final = struct.Struct("<Iq")
_EPOCH_CHUNK: Final = struct.Struct("<III")
_FENCE: Final = struct.Struct("<HIII")
_SNAPSHOT: Final = struct.Struct("<q")
_EMPTY: Final = struct.Struct("")
_FLAG: Final = struct.Struct("<?")

# kind: (message, packing of its leading numbers, their names)
_PLAIN: Final[dict[int, tuple[type[Any], struct.Struct, tuple[str, ...]]]] = {
    0: (Pressure, _FLAG, ("on",)),
    4: (m.Heard, _EPOCH_NUMBER, ("epoch", "frontier")),
    5: (m.Done, _EPOCH, ("epoch",)),
    6: (m.Flush, _EPOCH, ("epoch",)),
    7: (m.Flushed, _EPOCH_NUMBER, ("epoch", "origin")),
    8: (m.Bar1, _SNAPSHOT, ("snapshot",)),
    9: (m.Bar2, _SNAPSHOT, ("snapshot",)),
    10: (m.Frontier, _EPOCH_NUMBER, ("epoch", "value")),
    11: (m.Relay, _EPOCH_NUMBER, ("epoch", "value")),
    12: (m.Emission, _EPOCH_NUMBER, ("epoch", "value")),
    14: (m.Fenced, _EPOCH_CHUNK, ("epoch", "home", "chunk")),
    15: (m.Leave, _EMPTY, ()),
    16: (Taken, _SNAPSHOT, ("size",)),
}
_NUMBER_OF_KIND: Final = {kind: number for number, (kind, _, _) in _PLAIN.items()}
_DATA, _FORWARD, _ACQUIRE, _FENCE_KIND = 1, 2, 3, 13
KINDS: Final = {
    **{number: kind for number, (kind, _, _) in _PLAIN.items()},
    _DATA: m.Data,
    _FORWARD: m.Forward,
    _ACQUIRE: m.Acquire,
    _FENCE_KIND: m.Fence,
}


def encode(generation: int, stage: int, message: Message) -> bytes:
    """Return a message as a whole frame. Raises `TypeError` for a message that workers do not exchange.

    >>> reader = FrameReader()
    >>> [frame] = reader.feed(encode(1, 2, m.Done(3)))
    >>> frame
    Frame(generation=1, stage=2, message=Done(epoch=3))
    """
    number = _NUMBER_OF_KIND.get(type(message))
    if number is not None:
        _, packing, names = _PLAIN[number]
        body = packing.pack(*(getattr(message, name) for name in names))
    elif isinstance(message, m.Data | m.Forward):
        number = _DATA if isinstance(message, m.Data) else _FORWARD
        body = _EPOCH.pack(message.epoch) + encode_batch(message.batch)
    elif isinstance(message, m.Acquire):
        number = _ACQUIRE
        assert isinstance(message.state, bytes)
        hashes = message.hashes.astype("<u8", copy=False).tobytes()
        counts = _EPOCH_CHUNK.pack(message.epoch, message.chunk, len(message.hashes))
        body = counts + hashes + message.state
    elif isinstance(message, m.Fence):
        number = _FENCE_KIND
        stage_name = message.stage.encode()
        owners = np.array(message.owners, dtype="<i4").tobytes()
        numbers = (len(stage_name), message.epoch, message.home, message.chunk)
        body = _FENCE.pack(*numbers) + stage_name + owners
    else:
        raise TypeError(f"workers do not exchange {type(message).__name__}")
    return HEADER.pack(len(body), number, stage, generation) + body


def decode(kind: int, body: memoryview) -> Message:
    """Return the message in a frame's body. Raises `DecodingError`."""
    try:
        if kind in _PLAIN:
            message_type, packing, _ = _PLAIN[kind]
            message: Message = message_type(*packing.unpack(body))
            return message
        if kind in (_DATA, _FORWARD):
            (epoch,) = _EPOCH.unpack_from(body)
            batch = decode_batch(body[_EPOCH.size :])
            return m.Data(epoch, batch) if kind == _DATA else m.Forward(epoch, batch)
        if kind == _ACQUIRE:
            epoch, chunk, keys = _EPOCH_CHUNK.unpack_from(body)
            at = _EPOCH_CHUNK.size
            hashes = np.frombuffer(body, "<u8", keys, at)
            return m.Acquire(epoch, chunk, hashes, body[at + 8 * keys :].tobytes())
        if kind == _FENCE_KIND:
            length, epoch, home, chunk = _FENCE.unpack_from(body)
            at = _FENCE.size
            stage = str(body[at : at + length], "utf-8")
            owners = np.frombuffer(body, "<i4", -1, at + length).tolist()
            return m.Fence(stage, epoch, home, chunk, tuple(owners))
    except (struct.error, ValueError) as error:
        raise DecodingError(f"a frame of kind {kind} cannot be read: {error}") from error
    raise DecodingError(f"there is no kind of frame {kind}")


class FrameReader:
    """Splits the bytes that a link receives into frames."""

    __slots__ = ("_pieces", "_size", "_unpickling", "_wanted", "largest")

    def __init__(
        self,
        largest: int = MAX_BODY_BYTES,
        unpickling: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Read frames of up to `largest` bytes; records for a stage are unpickled within `unpickling(stage)`."""
        self.largest = largest
        self._unpickling = unpickling
        self._pieces: list[bytes | memoryview] = []
        self._size = 0
        self._wanted = HEADER.size

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add received bytes, and yield the frames that are complete now. Raises `DecodingError`."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size < self._wanted:
            return
        view = memoryview(b"".join(self._pieces) if len(self._pieces) > 1 else data)
        at = 0
        self._wanted = HEADER.size
        while len(view) - at >= HEADER.size:
            length, kind, stage, generation = HEADER.unpack_from(view, at)
            if length > self.largest or kind not in KINDS:
                raise DecodingError(f"a frame of kind {kind} and {length} bytes is invalid")
            end = at + HEADER.size + length
            if end > len(view):
                self._wanted = HEADER.size + length
                break
            body = view[at + HEADER.size : end]
            if kind in (_DATA, _FORWARD):
                with self._unpickling(stage):
                    message = decode(kind, body)
            else:
                message = decode(kind, body)
            yield Frame(generation, stage, message)
            at = end
        self._pieces = [view[at:].tobytes()] if at < len(view) else []
        self._size = len(view) - at
