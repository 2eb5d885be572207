"""One stream of a connector: pack messages into pieces, and keep those that the flow may request again.

Words: the flow *grants* a stream with the id after which to continue (`por`). A message is *passed over*, and not sent,
if the flow has it from another connector.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import countOf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railgun.engine.protocol.ingest.messages import LAST_ID, NONE
from railgun.engine.protocol.ingest.sender import Phase, Sent
from railgun.ingest.errors import FeedError, TooLargeError
from railgun.ingest.items import Item, Payload, item_fields
from railgun.transport.ingest_batch import (
    EARLIEST,
    LARGEST,
    LATEST,
    LONGEST_NAME,
    ids_of,
    pack,
    unpack,
)

PIECE_BYTES: Final = 64 << 10  # a piece of this size is sent
MAX_PIECE_MESSAGES: Final = 4_000
FRAME_HEADROOM_BYTES: Final = 4 << 10  # of a frame, for anything but messages
MESSAGE_OVERHEAD_BYTES: Final = 32  # of a message, besides its payload and key
REOPEN_PAUSES_S: Final = (0.05, 1.0)  # until a stream that is not free is requested again


@dataclass(slots=True)
class Kept:
    """The number of bytes that the streams of a connector keep."""

    size: int = 0


@dataclass(slots=True)
class Piece:
    """A packed batch of messages that is sent at once."""

    last: int
    blob: bytes


@dataclass(slots=True)
class Waiting:
    """Messages that are not packed into a piece yet."""

    ids: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times: list[int | None] = field(default_factory=list)
    size: int = 0


class Stream:
    """The messages of one stream, and its state.

    A stream with an `error` is stopped. What it keeps then no longer counts against the connector's limit, so that the
    other streams continue.
    """

    def __init__(self, sent: Sent, all_kept: Kept) -> None:
        self.sent = sent
        self.all_kept = all_kept  # bytes kept by all streams that are not stopped
        self.room = all_kept  # the counter for what this stream keeps
        self.last = NONE  # the last id that the program passed in
        self.keeps = True  # whether pieces are kept until they are acknowledged
        self.kept: deque[Piece] = deque()  # pieces that are not acknowledged
        self.next = 0  # the index in `kept` of the first piece that was not sent
        self.waiting = Waiting()
        self.ending: Callable[[], bool] | None = None  # whether to announce the end of the stream
        self.changed: asyncio.Future[None] | None = None  # done at the next change of this stream
        self.busy = ""  # the exclusive call that uses the stream: "fed" or "ended"
        self.first: int | None = None  # the first id that the program passed in
        self.floor = NONE  # the last id that the flow had at its last grant
        self.base = NONE  # messages up to this id cannot be sent again
        self.own = NONE  # the highest id that was sent from here
        self._passed_to = NONE  # the highest id noted in `passed`
        self.passed: list[NDArray[np.int64]] = []  # ids passed over and not reported yet
        self.wanted = False  # whether the stream is to be open
        self.queued = False  # whether the stream is queued for sending
        self.grants = 0  # how often the flow has granted the stream
        self.pause = REOPEN_PAUSES_S[0]
        self.error: Exception | None = None

    @property
    def name(self) -> str:
        """The name of the stream."""
        return self.sent.name

    @property
    def is_open(self) -> bool:
        """Whether the stream's messages can be sent now."""
        return self.sent.phase is Phase.OPEN

    # ------------------------------------------------------------ packing

    def add(self, id: int, payload: Payload, key: Any = None, time: Any = None) -> None:
        """Queue a message, to be packed with those that follow closely; raise `FeedError` if it is invalid."""
        if type(id) is not int or not self.last < id <= LAST_ID:
            raise self._bad_id(id)
        what = f"message {id} of {self.name!r}"
        if type(payload) is bytes:
            data = payload
        elif isinstance(payload, str):
            data = payload.encode(errors="surrogatepass")
        elif isinstance(payload, bytes | bytearray | memoryview):
            data = bytes(payload)
        else:
            raise FeedError(f"{what}: a payload is bytes or text, not {payload!r:.80}")
        size, most = len(data) + MESSAGE_OVERHEAD_BYTES, LARGEST - FRAME_HEADROOM_BYTES
        if key is not None:
            size += len(_text(what, key))
        if time is not None and (type(time) is not int or not EARLIEST <= time <= LATEST):
            why = (
                "a whole number of microseconds"
                if type(time) is not int
                else f"from {EARLIEST} to {LATEST} µs"
            )
            raise FeedError(f"{what}: a time is {why}, not {time!r:.80}")
        if size > most:
            raise TooLargeError(
                f"{what} has {size - MESSAGE_OVERHEAD_BYTES:,} bytes, with its key: "
                f"{most - MESSAGE_OVERHEAD_BYTES:,} are the most"
            )
        self._note_span(id, id)
        if self.waiting.size + size > most:
            self.seal()
        waiting = self.waiting
        waiting.ids.append(id)
        waiting.payloads.append(data)
        waiting.keys.append(key)
        waiting.times.append(time)
        waiting.size += size
        if len(waiting.ids) >= MAX_PIECE_MESSAGES:
            self.seal()

    def add_all(self, items: Sequence[Item]) -> None:
        """Add each item and pack them; items of plain ids and bytes are checked all at once, which is faster."""
        count = len(items)
        try:
            ids, payloads = [item[0] for item in items], [item[1] for item in items]
            plain = (
                countOf(map(len, items), 2) == count
                and countOf(map(type, ids), int) == count
                and countOf(map(type, payloads), bytes) == count
                and self.last < ids[0]
                and max(ids) == ids[-1] <= LAST_ID
            )
            sizes = np.fromiter(map(len, payloads), np.int64, count) if plain else np.zeros(1)
            numbers = np.array(ids if plain else [0], np.int64)
        except (TypeError, LookupError, OverflowError):  # an item is malformed
            plain = False
        if not plain or sizes.max() > PIECE_BYTES or bool((numbers[1:] <= numbers[:-1]).any()):
            try:
                for item in items:
                    self.add(*item_fields(item))
            finally:
                self.seal()
            return
        self.seal()
        self._note_ids(numbers)
        pieces = (np.cumsum(sizes + MESSAGE_OVERHEAD_BYTES) // PIECE_BYTES).astype(np.int64)
        stops = [*(np.flatnonzero(pieces[1:] != pieces[:-1]) + 1).tolist(), count]
        for begin, stop in zip([0, *stops[:-1]], stops, strict=True):
            self._keep(Piece(ids[stop - 1], pack(numbers[begin:stop], payloads[begin:stop])))  # type: ignore[arg-type]

    def take_over(self, piece: Piece) -> int:
        """Append a piece that another `Stream` has packed, with higher ids; return the number of its messages."""
        ids = ids_of(piece.blob)
        self.seal()
        self._note_ids(ids)
        self._keep(piece)
        return len(ids)

    def _note_ids(self, ids: NDArray[np.int64]) -> None:
        before = ids[ids <= self.floor]
        self._note_span(int(before[-1] if len(before) else ids[0]), int(ids[-1]))

    def _note_span(self, first: int, last: int) -> None:
        """Note that the program passed in messages up to `last`.

        `first` is the first id, or the last of these ids that the flow has. A program that continues after the flow's
        position, without passing in earlier messages, relies on the flow having them.
        """
        if self.first is None:
            self.first = first
        if self.last < self.floor < first:
            self.base = max(self.base, self.floor)
        self.last = last

    def seal(self) -> None:
        """Pack the waiting messages into a piece, to be sent."""
        waiting = self.waiting
        if not waiting.ids:
            return
        self.waiting = Waiting()
        times: Sequence[int | None] | None = waiting.times
        missing = waiting.times.count(None)
        if missing == len(waiting.times):
            times = None
        elif missing:
            now = time.time_ns() // 1000
            times = [now if moment is None else moment for moment in waiting.times]
        keys = waiting.keys if any(key is not None for key in waiting.keys) else None
        blob = pack(waiting.ids, waiting.payloads, times, keys)  # type: ignore[arg-type]
        self._keep(Piece(waiting.ids[-1], blob))

    def _keep(self, piece: Piece) -> None:
        self.kept.append(piece)
        self.room.size += len(piece.blob)
        if self.is_open and self.sent.at > self.own:
            self._note_passed(piece)
        if self.is_open and piece.last <= self.sent.at:
            self._pass()
            self.acknowledged(self.sent.acked)

    def _pass(self) -> None:
        """Skip the pieces that the flow already has."""
        while self.has_more and self.kept[self.next].last <= self.sent.at:
            self.next += 1

    def _note_passed(self, piece: Piece) -> bool:
        """Note which messages of a piece the flow has from others; return whether the next piece may hold more."""
        if piece.last > self._passed_to:
            ids = ids_of(piece.blob)
            passed = ids[(ids > max(self.own, self._passed_to)) & (ids <= self.sent.at)]
            if len(passed):
                self.passed.append(passed)
                self._passed_to = int(passed[-1])
        return piece.last <= self.sent.at

    # ------------------------------------------------------------ sending and acknowledgement

    @property
    def has_more(self) -> bool:
        """Whether there is a piece to be sent."""
        return self.next < len(self.kept)

    def take(self) -> Piece:
        """Return the next piece to send; keep it until it is acknowledged, if the stream `keeps`."""
        piece = self.kept[self.next]
        self.own = max(self.own, piece.last)
        if self.keeps:
            self.next += 1
        else:
            self.forget_first()
        return piece

    def granted(self, por: int) -> bool:
        """Continue after the id `por` (`sent.at`); return False if the kept messages do not reach back so far."""
        before, self.floor = self.floor, por
        if not self.keeps:
            self.drop()
            return True
        if por < self.base:
            return False
        if self.first is not None and por < self.first:
            # A gap is fine: the kept messages follow the flow's position, now and whenever it returns to it. But if
            # the flow had some of these messages, and now wants earlier ones that it had as well, those are not kept.
            if por != self.base and before >= self.first:
                return False
            self.base = por
        self.next = 0
        if por > self.own:
            for piece in self.kept:
                if not self._note_passed(piece):
                    break
        self._pass()
        return True

    def acknowledged(self, por: int) -> None:
        """Drop the pieces that are acknowledged up to the id `por`."""
        while self.keeps and self.kept and self.kept[0].last <= por:
            self.base = max(self.base, self.forget_first().last)
            self.next = max(0, self.next - 1)

    def forget_first(self) -> Piece:
        """Drop the first kept piece, and return it."""
        piece = self.kept.popleft()
        self.room.size -= len(piece.blob)
        return piece

    def drop(self) -> None:
        """Drop all messages that are kept or wait to be sent."""
        while self.kept:
            self.forget_first()
        self.next = 0
        self.waiting = Waiting()

    def stop(self, error: Exception) -> None:
        """Stop the stream with `error`, until `go_on`."""
        self.go_on()
        self.error = error
        own = Kept(sum(len(piece.blob) for piece in self.kept))
        self.all_kept.size -= own.size
        self.room = own

    def go_on(self) -> None:
        """Clear the stream's error, so that it continues."""
        if self.error is not None:
            self.error = None
            self.all_kept.size += self.room.size
            self.room = self.all_kept

    def leave_out(self, id: int) -> bool:
        """Drop the message with this id; return False if it is not kept here."""
        self.seal()
        for at, piece in enumerate(self.kept):
            if id > piece.last:
                continue
            ids, times, keys, payloads = unpack(piece.blob)
            rows = [row for row, row_id in enumerate(ids.tolist()) if row_id != id]
            if len(rows) == len(payloads):
                return False
            self.room.size -= len(piece.blob)
            if rows:
                blob = pack(
                    ids[rows],
                    [payloads[row] for row in rows],
                    None if times is None else times[rows].tolist(),
                    None if keys is None else [keys[row] for row in rows],
                )
                self.kept[at] = Piece(int(ids[rows[-1]]), blob)
                self.room.size += len(blob)
            else:
                del self.kept[at]
                self.next -= self.next > at
            if self.last == id:
                self.last = self.kept[-1].last if self.kept else self.sent.acked
            return True
        return False

    def _bad_id(self, id: Any) -> FeedError:
        if type(id) is not int or id < 0 or id > LAST_ID:
            return FeedError(
                f"an id of {self.name!r} is a whole number from 0 to {LAST_ID}, not {id!r}"
            )
        return FeedError(f"ids of {self.name!r} go up: {id} does not come after {self.last}")


def _text(what: str, key: Any) -> bytes:
    try:
        if isinstance(key, str):
            return key.encode()
    except UnicodeEncodeError:
        pass
    raise FeedError(f"{what}: a key is text, not {key!r:.80}")


def check_name(name: Any) -> None:
    """Raise `FeedError` if `name` is no valid name of a stream."""
    try:
        plain = isinstance(name, str) and 0 < len(name.encode()) <= LONGEST_NAME
    except UnicodeEncodeError:
        plain = False
    if not plain:
        raise FeedError(f"a stream's name is text of up to {LONGEST_NAME} bytes, not {name!r:.80}")
