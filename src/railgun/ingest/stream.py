"""A stream of a connector: the messages that were given, and what of them may be asked for again."""

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
from railgun.ingest.items import Item, Payload, parts
from railgun.transport.ingest_batch import (
    EARLIEST,
    LARGEST,
    LATEST,
    LONGEST_NAME,
    ids_of,
    pack,
    unpack,
)

PIECE: Final = 64 << 10  # bytes that are sent at once
MOST: Final = 4_000  # messages in a piece
HEADROOM: Final = 4 << 10  # bytes of a frame that are not of messages
OVERHEAD: Final = 32  # bytes that a message takes apart from its own
ASK_AGAIN: Final = (0.05, 1.0)  # seconds until a stream that is not free is asked for again


@dataclass(slots=True)
class Kept:
    """Bytes that all streams of a connector keep."""

    size: int = 0


@dataclass(slots=True)
class Piece:
    """Messages that are sent together."""

    last: int
    blob: bytes


@dataclass(slots=True)
class Waiting:
    """Messages that are not a piece yet."""

    ids: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times: list[int | None] = field(default_factory=list)
    size: int = 0


class Stream:
    """A stream of this connector.

    One that has an `error` stands still. What it keeps takes no room from the others then: they go on.
    """

    def __init__(self, sent: Sent, all_kept: Kept) -> None:
        self.sent = sent
        self.all_kept = all_kept  # by all that go on
        self.room = all_kept  # where what this one keeps counts
        self.last = NONE  # the last id that was given to be sent
        self.keeps = True  # whether what is sent is kept until it is acknowledged
        self.kept: deque[Piece] = deque()  # not acknowledged
        self.next = 0  # of these, the first that has not been sent
        self.waiting = Waiting()
        self.ending: Callable[[], bool] | None = None  # whether its end is to be said
        self.changed: asyncio.Future[None] | None = None  # who waits for this stream
        self.busy = ""  # what is being done with it, which nobody else may do meanwhile
        self.first: int | None = None  # the first id that was given to be sent
        self.floor = NONE  # what the flow had when it was granted last
        self.base = NONE  # up to here nothing can be sent again
        self.own = NONE  # the highest id that was sent from here
        self._told = NONE  # up to here it was looked for such
        self.passed: list[
            NDArray[np.int64]
        ] = []  # ids that were given, and that the flow had from others
        self.wanted = False  # whether it is to be open
        self.queued = False  # whether it is among those that have something to send
        self.grants = 0
        self.pause = ASK_AGAIN[0]
        self.error: Exception | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.sent.name

    @property
    def is_open(self) -> bool:
        """Whether it can be sent now."""
        return self.sent.phase is Phase.OPEN

    # ------------------------------------------------------------ what is given

    def add(self, id: int, payload: Payload, key: Any = None, time: Any = None) -> None:
        """A message is to be sent, with those that follow closely."""
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
        size = len(data) + OVERHEAD
        if key is not None:
            size += len(_text(what, key))
        if time is not None and (type(time) is not int or not EARLIEST <= time <= LATEST):
            why = (
                "a whole number of microseconds"
                if type(time) is not int
                else f"from {EARLIEST} to {LATEST} µs"
            )
            raise FeedError(f"{what}: a time is {why}, not {time!r:.80}")
        if size > LARGEST - HEADROOM:
            raise TooLargeError(
                f"{what} has {size - OVERHEAD:,} bytes, with its key: {LARGEST - HEADROOM - OVERHEAD:,} are the most"
            )
        self._give(id, id)
        if self.waiting.size + size > LARGEST - HEADROOM:
            self.seal()
        waiting = self.waiting
        waiting.ids.append(id)
        waiting.payloads.append(data)
        waiting.keys.append(key)
        waiting.times.append(time)
        waiting.size += size
        if len(waiting.ids) >= MOST:
            self.seal()

    def add_all(self, items: Sequence[Item]) -> None:
        """As `add` for each, and sealed; those that are plain ids and bytes are not looked at one by one."""
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
        except (TypeError, LookupError, OverflowError):  # something odd is among them
            plain = False
        if not plain or sizes.max() > PIECE or bool((numbers[1:] <= numbers[:-1]).any()):
            try:
                for item in items:
                    self.add(*parts(item))
            finally:
                self.seal()
            return
        self.seal()
        self._give_all(numbers)
        pieces = (np.cumsum(sizes + OVERHEAD) // PIECE).astype(np.int64)
        stops = [*(np.flatnonzero(pieces[1:] != pieces[:-1]) + 1).tolist(), count]
        for begin, stop in zip([0, *stops[:-1]], stops, strict=True):
            self._keep(Piece(ids[stop - 1], pack(numbers[begin:stop], payloads[begin:stop])))  # type: ignore[arg-type]

    def take_over(self, piece: Piece) -> int:
        """A piece of another one, of messages that come after all of this one; how many."""
        ids = ids_of(piece.blob)
        self.seal()
        self._give_all(ids)
        self._keep(piece)
        return len(ids)

    def _give_all(self, ids: NDArray[np.int64]) -> None:
        before = ids[ids <= self.floor]
        self._give(int(before[-1] if len(before) else ids[0]), int(ids[-1]))

    def _give(self, first: int, last: int) -> None:
        """Messages are given, from `first` to `last`; `first` is the last one that the flow has, if it is among them.

        Who goes on after what the flow has, without giving that, relies on the flow having it.
        """
        if self.first is None:
            self.first = first
        if self.last < self.floor < first:
            self.base = max(self.base, self.floor)
        self.last = last

    def seal(self) -> None:
        """What waits becomes a piece, to be sent."""
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
        """Pass over what the flow has already."""
        while self.has_more and self.kept[self.next].last <= self.sent.at:
            self.next += 1

    def _note_passed(self, piece: Piece) -> bool:
        """Note which of these the flow has from others; whether there may be more in the next piece."""
        if piece.last > self._told:
            ids = ids_of(piece.blob)
            passed = ids[(ids > max(self.own, self._told)) & (ids <= self.sent.at)]
            if len(passed):
                self.passed.append(passed)
                self._told = int(passed[-1])
        return piece.last <= self.sent.at

    # ------------------------------------------------------------ what becomes of it

    @property
    def has_more(self) -> bool:
        """Whether there is a piece to be sent."""
        return self.next < len(self.kept)

    def take(self) -> Piece:
        """The next piece, which is kept, if that is to be."""
        piece = self.kept[self.next]
        self.own = max(self.own, piece.last)
        if self.keeps:
            self.next += 1
        else:
            self.forget_first()
        return piece

    def granted(self, por: int) -> bool:
        """The flow wants it after that id (`sent.at`); False: what is kept is not enough."""
        before, self.floor = self.floor, por
        if not self.keeps:
            self.drop()
            return True
        if por < self.base:
            return False
        if self.first is not None and por < self.first:
            # Gaps are fine: what is here follows what the flow has, now and whenever it comes back to that. But if
            # it had messages that are here, and wants some before them that it had as well, these are not here.
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
        """What is safe need not be kept."""
        while self.keeps and self.kept and self.kept[0].last <= por:
            self.base = max(self.base, self.forget_first().last)
            self.next = max(0, self.next - 1)

    def forget_first(self) -> Piece:
        """Keep the first piece no longer."""
        piece = self.kept.popleft()
        self.room.size -= len(piece.blob)
        return piece

    def drop(self) -> None:
        """Forget what waits to be sent."""
        while self.kept:
            self.forget_first()
        self.next = 0
        self.waiting = Waiting()

    def stop(self, error: Exception) -> None:
        """It stands still, until `go_on`."""
        self.go_on()
        self.error = error
        own = Kept(sum(len(piece.blob) for piece in self.kept))
        self.all_kept.size -= own.size
        self.room = own

    def go_on(self) -> None:
        """What was wrong with it is mended."""
        if self.error is not None:
            self.error = None
            self.all_kept.size += self.room.size
            self.room = self.all_kept

    def leave_out(self, id: int) -> bool:
        """Forget one message; False: it is not here."""
        self.seal()
        for at, piece in enumerate(self.kept):
            if id > piece.last:
                continue
            ids, times, keys, payloads = unpack(piece.blob)
            rows = [row for row, known in enumerate(ids.tolist()) if known != id]
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
    """Refuse what cannot be the name of a stream."""
    try:
        plain = isinstance(name, str) and 0 < len(name.encode()) <= LONGEST_NAME
    except UnicodeEncodeError:
        plain = False
    if not plain:
        raise FeedError(f"a stream's name is text of up to {LONGEST_NAME} bytes, not {name!r:.80}")
