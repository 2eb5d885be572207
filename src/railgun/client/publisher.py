"""What a client publishes: messages of many tasks, on their way together.

Rules:

1. Those that come up in one turn of the event loop travel together, and those that come up while as many publishes of
   the stream as may be are under way. They are sent in the order in which they came.
2. Messages with IDs and messages without do not travel together: the first can be sent again when a connection is lost,
   and the others cannot.
3. What nobody waits for any more, and was never sent, is not sent. Pieces that are staged are: those behind them say
   how many messages lie before them. They are not sent when the sequence is dropped.
4. What was refused for want of a master, so that nothing was done, is sent again until its deadline, with or without
   IDs. When all that is under way to the stream has been answered, the refused ones go again in their order; until then
   nothing more is sent to it. The node refuses those that were on their way behind one that it has refused.
5. With `acks="none"` whoever publishes waits only until it is sent. Nodes answer such publishes at once, and until they
   do they count as under way: so what waits here is bounded by those who wait. They are never sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from railgun.client.errors import DuplicateIdError, StreamsError
from railgun.client.nodes import Pauses
from railgun.transport.commands import LARGEST
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import HEADER, build

if TYPE_CHECKING:
    from railgun.client.client import Client

UNDER_WAY: Final = 4  # publishes of a stream that are not answered
ENOUGH: Final = 256 << 10  # bytes that do not wait for more
MOST: Final = LARGEST - 4096  # bytes of one publish
MOST_MESSAGES: Final = 20_000  # of one publish: that many fit, however long their IDs
PER_MESSAGE: Final = 12  # bytes of a batch besides payload and ID
SOON: Final = (0.05, 0.5)  # seconds until what had no master is tried again: at first, and at most
Acks = Literal["quorum", "master", "all", "none"]
_LEVELS: Final[dict[str, p.Acks]] = {
    "quorum": p.QUORUM, "master": p.MASTER, "all": p.ALL, "none": p.NONE,
}  # fmt: skip


def level(acks: str) -> p.Acks:
    """When a publish is answered, as it is told to the node.

    >>> level("quorum"), level("all")
    (0, 2)
    >>> level("some")
    Traceback (most recent call last):
    railgun.client.errors.StreamsError: acks is quorum, master, all or none, not 'some' (BAD_REQUEST)
    """
    found = _LEVELS.get(acks) if isinstance(acks, str) else None
    if found is None:
        raise StreamsError("BAD_REQUEST", f"acks is quorum, master, all or none, not {acks!r}")
    return found


class Batch:
    """Messages of one stream that wait to be sent, or to be answered."""

    __slots__ = (
        "acks", "again", "deadline", "frame", "futures", "headers", "ids", "payloads", "refusal", "safe", "size",
        "staging", "stream", "together", "topic", "unsent", "wanted",
    )  # fmt: skip

    def __init__(self, stream: str, topic: str, safe: bool, acks: p.Acks = p.QUORUM) -> None:
        self.stream = stream
        self.topic = topic
        self.acks = acks
        self.safe = safe and acks != p.NONE
        """Whether it can be sent twice without harm: all of its messages have IDs, or all together one."""
        self.payloads: list[bytes] = []
        self.ids: list[bytes | None] = []  # of all messages, or none if none has one
        self.headers: list[bytes | None] = []
        self.futures: list[tuple[asyncio.Future[Any], int, float]] = []
        """Who waits, for how many messages each, and until when."""
        self.size = 0
        self.deadline = math.inf  # the first one of its futures
        self.together = False  # one ID for all of it
        self.staging: p.Staging | None = None  # what it is staged for
        self.wanted: Callable[[], bool] | None = (
            None  # whether to send it though nobody waits for it
        )
        self.again = False  # whether it may have been stored before
        self.refusal: StreamsError | None = None  # it was sent, and nothing was done
        self.frame = 0  # its number in the present connection; 0: it is not in that
        self.unsent = False  # it was not written before its connection was lost

    def add(
        self,
        payloads: list[bytes],
        ids: list[bytes | None] | None,
        headers: Sequence[bytes | None] | None,
        size: int,
    ) -> None:
        """More messages, of so many bytes."""
        before = len(self.payloads)
        self.payloads += payloads
        self.size += size
        for column, given in ((self.ids, ids), (self.headers, headers)):
            if given or column:
                column += [None] * (before - len(column))
                column += given or [None] * len(payloads)

    def wait(self, future: asyncio.Future[Any], count: int, deadline: float) -> None:
        """Somebody waits for so many of them."""
        self.futures.append((future, count, deadline))
        if deadline < self.deadline:
            self.deadline = deadline

    def fine(self, code: str) -> bool:
        """Whether a message that was not stored is there nevertheless, and that is what was wanted."""
        return code == "OK" or (self.again and code == "DUPLICATE_ID")

    def takes(self, safe: bool, size: int, acks: p.Acks) -> bool:
        """Whether more may be added, with IDs or without: who has one shares no fate with who has none."""
        fits = self.size < ENOUGH and self.size + size <= MOST and self.acks == acks
        alone = self.together or self.staging is not None
        return fits and not alone and self.safe == (safe and acks != p.NONE)

    def apart(self) -> Iterable[Batch]:
        """The messages of each who waits, as batches of their own."""
        at = 0
        for future, count, deadline in self.futures:
            some = slice(at, at + count)
            payloads, ids, headers = self.payloads[some], self.ids[some], self.headers[some]
            at += count
            one = Batch(self.stream, self.topic, self.safe, self.acks)
            one.add(payloads, ids, headers, _size(payloads, ids, headers))
            one.wait(future, count, deadline)
            yield one

    @property
    def forsaken(self) -> bool:
        """Whether nobody waits any more, and it is not to be sent either."""
        if self.wanted is not None and self.wanted():
            return False
        return all(future.done() for future, _, _ in self.futures)

    def fail(self, error: Exception) -> None:
        """It came to nothing: tell who waits."""
        for future, _, _ in self.futures:
            tell(future, error)

    def late(self, now: float) -> list[asyncio.Future[Any]]:
        """Whose deadline has passed."""
        if self.deadline > now:
            return []
        self.deadline = min(
            (end for future, _, end in self.futures if end >= now and not future.done()),
            default=math.inf,
        )
        return [future for future, _, deadline in self.futures if deadline < now]


class _Held:
    """A stream without a master: publishes that were refused, by their numbers."""

    __slots__ = ("numbers", "pauses", "timer", "why")

    def __init__(self) -> None:
        self.why = ""
        self.numbers: set[int] = set()
        self.pauses = Pauses(*SOON)
        self.timer: asyncio.TimerHandle | None = None


class Publisher:
    """All that a client publishes."""

    def __init__(self, client: Client, numbers: Iterator[int]) -> None:
        self._client = client
        self._numbers = numbers
        self._waiting: dict[tuple[str, str], deque[Batch]] = {}  # all but the last are full
        self._under_way: dict[int, Batch] = {}
        self._counts: dict[str, int] = {}  # of those, by their stream
        self._held: dict[str, _Held] = {}

    # ------------------------------------------------------------ the connection

    def resume(self) -> None:
        """There is a connection: send what can be sent again, and what waits."""
        for number, batch in list(self._under_way.items()):
            if batch.refusal is None and not batch.unsent:
                batch.again = True
            elif batch.forsaken:
                self._done(number)
                continue
            batch.refusal = None
            batch.unsent = False
            try:
                self._send_batch(number, batch)
            except Exception as error:  # its own: the others go on
                self._done(number).fail(error)
        for key in list(self._waiting):
            self._try_send(key)

    def go_on(self) -> None:
        """The connection is known to be alive again: send what waits."""
        for stream in list(self._held):
            self._look_after(stream)
        for key in list(self._waiting):
            self._try_send(key)

    def cut_off(self, error: StreamsError, written: int) -> None:
        """The connection is lost; the first `written` frames had been written to it."""
        for held in self._held.values():
            if held.timer is not None:
                held.timer.cancel()
        self._held.clear()
        for number, batch in list(self._under_way.items()):
            batch.unsent |= batch.refusal is None and batch.frame > written and batch.acks != p.NONE
            batch.frame = 0
            if self._client.closing or not (batch.refusal or batch.unsent):
                self._failed(number, error)

    def _failed(self, number: int, error: StreamsError) -> None:
        """A publish came to nothing, or nobody knows; if it is safe, it will be sent again."""
        if self._client.closing or not self._under_way[number].safe:
            self._done(number).fail(error)

    def close(self) -> None:
        """What was never sent never will be."""
        closed = StreamsError("CLOSED", "the client is closed")
        for batch in self._batches():
            batch.fail(closed)
        self._waiting.clear()

    # ------------------------------------------------------------ who waits

    def _batches(self) -> Iterable[Batch]:
        return itertools.chain(*self._waiting.values(), self._under_way.values())

    def pending(self) -> list[asyncio.Future[Any]]:
        """All who wait."""
        waiting = (future for batch in self._batches() for future, _, _ in batch.futures)
        return [future for future in waiting if not future.done()]

    @property
    def awaits(self) -> bool:
        """Whether a publish that was sent is not answered."""
        return any(batch.refusal is None for batch in self._under_way.values())

    @property
    def trouble(self) -> str:
        """Why publishes that were sent are not stored yet, as far as a node has said; empty: no node has."""
        return next((held.why for held in self._held.values() if held.why), "")

    def late(self, now: float) -> list[tuple[asyncio.Future[Any], Exception]]:
        """Those whose deadline has passed, and what they are to be told: what is known not to be stored says so."""
        return [
            (future, TimeoutError() if batch.again else batch.refusal or TimeoutError())
            for batch in self._batches()
            for future in batch.late(now)
        ]

    # ------------------------------------------------------------ sending

    def put_many(
        self,
        stream: str,
        topic: str,
        payloads: list[bytes],
        ids: list[bytes | None] | None,
        deadline: float,
        acks: p.Acks = p.QUORUM,
    ) -> list[asyncio.Future[Any]]:
        """Publish messages, in as many publishes as it takes."""
        totals = list(itertools.accumulate(map(len, payloads)))
        futures, at, before = [], 0, 0
        while at < len(payloads):
            end = min(bisect_left(totals, before + ENOUGH, at) + 1, at + MOST_MESSAGES)
            some = ids[at:end] if ids else None
            futures.append(self.put(stream, topic, payloads[at:end], some, None, deadline, acks))
            at, before = end, totals[min(end, len(totals)) - 1]
        return futures

    def put_one(
        self, stream: str, topic: str, payload: bytes, deadline: float, acks: p.Acks = p.QUORUM
    ) -> asyncio.Future[Any]:
        """Publish one message without an ID or headers: in the shortest way, for most are so."""
        line = self._waiting.get((stream, topic))
        size = len(payload) + PER_MESSAGE
        batch = line[-1] if line else None
        if batch is None or batch.ids or batch.headers or not batch.takes(False, size, acks):
            return self.put(stream, topic, [payload], None, None, deadline, acks)
        batch.payloads.append(payload)
        batch.size += size
        future: asyncio.Future[Any] = self._client.loop.create_future()
        batch.wait(future, 1, deadline)
        if batch.size >= ENOUGH:
            self._try_send((stream, topic))
        return future

    def put(
        self,
        stream: str,
        topic: str,
        payloads: list[bytes],
        ids: list[bytes | None] | None,
        headers: list[bytes] | None,
        deadline: float,
        acks: p.Acks = p.QUORUM,
    ) -> asyncio.Future[Any]:
        """Publish messages that belong to one who waits; the offsets are the future's."""
        key = (stream, topic)
        size = _size(payloads, ids, headers)
        line = self._line(key)
        safe = ids is not None and all(ids)
        if not line or not line[-1].takes(safe, size, acks):
            line.append(Batch(stream, topic, safe, acks))
        batch = line[-1]
        future: asyncio.Future[Any] = self._client.loop.create_future()
        batch.add(payloads, ids, headers, size)
        batch.wait(future, len(payloads), deadline)
        if batch.size >= ENOUGH:
            self._try_send(key)
        return future

    def put_together(
        self,
        stream: str,
        payloads: list[bytes],
        id: bytes,
        deadline: float,
        acks: p.Acks = p.QUORUM,
    ) -> asyncio.Future[Any]:
        """Publish messages that are stored wholly or not at all."""
        ids = [id, *[None] * (len(payloads) - 1)]
        batch = Batch(stream, "", True, acks)
        batch.together = True
        batch.add(payloads, ids, None, _size(payloads, ids, None))
        line = self._line((stream, ""))
        future: asyncio.Future[Any] = self._client.loop.create_future()
        batch.wait(future, len(payloads), deadline)
        line.append(batch)
        return future

    def put_staged(
        self,
        stream: str,
        payloads: list[bytes],
        staging: p.Staging,
        deadline: float,
        wanted: Callable[[], bool] | None = None,
    ) -> asyncio.Future[Any]:
        """Stage messages, which nobody sees before their producer commits them; they may be sent again.

        `wanted`: whether they are to be sent when nobody waits for them any more. Raises `StreamsError` with the code
        `TOO_LARGE`.
        """
        check_size(payloads)
        batch = Batch(stream, "", True)
        batch.staging, batch.wanted = staging, wanted
        batch.add(payloads, None, None, _size(payloads, None, None))
        future: asyncio.Future[Any] = self._client.loop.create_future()
        batch.wait(future, len(payloads), deadline)
        self._line((stream, "")).append(batch)
        self._try_send((stream, ""))
        return future

    def _line(self, key: tuple[str, str]) -> deque[Batch]:
        """What waits to be sent to a stream; it will be looked after."""
        if self._client.closing:
            raise StreamsError("CLOSED", "the client is closed")
        line = self._waiting.get(key)
        if line is None:
            line = self._waiting[key] = deque()
            self._client.loop.call_soon(self._try_send, key)
        return line

    def _try_send(self, key: tuple[str, str]) -> None:
        """Send what waits, unless enough is under way and it is little."""
        line = self._waiting.get(key)
        while line and self._client.may_send():
            held = self._held.get(key[0])
            if held is not None and held.numbers:
                return
            under_way = self._counts.get(key[0], 0)
            if under_way >= UNDER_WAY or (under_way > 1 and line[0].size < ENOUGH):
                return
            batch = line.popleft()
            if not line:
                del self._waiting[key]
            if batch.forsaken:
                continue
            number = next(self._numbers)
            self._under_way[number] = batch
            self._counts[key[0]] = under_way + 1
            try:
                self._send_batch(number, batch)
                if batch.acks == p.NONE:
                    for future, count, _ in batch.futures:
                        if not future.done():
                            future.set_result([-1] * count)
            except Exception as error:
                self._done(number)
                if len(batch.futures) == 1:
                    batch.fail(error)
                    continue
                line.extendleft(reversed(list(batch.apart())))  # one of them is wrong: which?
                self._waiting[key] = line

    def _send_batch(self, number: int, batch: Batch) -> None:
        blobs = [build(batch.payloads, batch.ids or None, batch.headers or None)]
        _check_bytes(len(blobs[0]))
        told = p.Publish(
            request=number,
            stream=batch.stream,
            topic=batch.topic,
            together=batch.together,
            acks=batch.acks,
            staging=batch.staging,
        )
        self._client.send(told, blobs)
        batch.frame = self._client.frames

    # ------------------------------------------------------------ answers

    def answered(self, answer: p.Published | p.Failed) -> bool:
        """The node has said something; whether it is the answer to a publish."""
        if answer.request not in self._under_way:
            return False
        if isinstance(answer, p.Published):
            self._published(answer)
        else:
            error = StreamsError(answer.code, answer.text, answer.no_quorum)
            batch = self._under_way[answer.request]
            if answer.code == "CLOSED":
                self._failed(answer.request, error)
            elif batch.acks != p.NONE and self._client.tries_again(error, idempotent=batch.safe):
                self._masterless(answer.request, error)
            else:
                self._done(answer.request).fail(error)
        return True

    def _masterless(self, number: int, error: StreamsError) -> None:
        """There was no master for a publish, or there is none any more: it is sent again."""
        batch = self._under_way[number]
        batch.again |= not error.nothing_done
        batch.refusal = error
        held = self._held.setdefault(batch.stream, _Held())
        held.why = str(error)
        held.numbers.add(number)
        self._look_after(batch.stream)

    def _look_after(self, stream: str) -> None:
        """When all that is under way was refused, it is sent again after a while."""
        held = self._held.get(stream)
        if held is None or not held.numbers or held.timer is not None:
            return
        if len(held.numbers) >= self._counts[stream]:
            held.timer = self._client.loop.call_later(held.pauses.next(), self._send_again, stream)

    def _send_again(self, stream: str) -> None:
        held = self._held[stream]
        held.timer = None
        if not self._client.may_send():
            return  # with the next connection, or when this one is known to be alive
        numbers, held.numbers = sorted(held.numbers), set()
        for number in numbers:
            batch = self._under_way[number]
            if batch.forsaken:
                self._done(number)
                continue
            batch.refusal = None
            self._send_batch(number, batch)

    def _done(self, number: int) -> Batch:
        batch = self._under_way.pop(number)
        self._counts[batch.stream] -= 1
        if batch.stream in self._held:
            self._held[batch.stream].numbers.discard(number)
            self._look_after(batch.stream)
        for key in [key for key in self._waiting if key[0] == batch.stream]:
            self._client.loop.call_soon(self._try_send, key)
        return batch

    def _published(self, answer: p.Published) -> None:
        batch = self._done(answer.request)
        if batch.stream in self._held and not self._held[batch.stream].numbers:
            del self._held[batch.stream]  # there is a master again
        count = len(batch.payloads)
        if not answer.stored and not answer.refused:  # ephemeral
            for future, some, _ in batch.futures:
                if not future.done():
                    future.set_result([answer.matched] * some)
            return
        offsets: list[int] = list(range(answer.base, answer.base + count))
        refused = {one.index: one for one in answer.refused}
        if refused and batch.together:
            base = answer.refused[0].offset
            offsets = list(range(base, base + count))
        elif refused:
            following = itertools.count(answer.base)
            offsets = [refused[n].offset if n in refused else next(following) for n in range(count)]
        at = 0
        for future, some, _ in batch.futures:
            wrong = [
                refused[n]
                for n in range(at, at + some)
                if n in refused and not batch.fine(refused[n].code)
            ] if refused else []  # fmt: skip
            if future.done():
                pass
            elif wrong:
                future.set_exception(_refusal(batch.stream, wrong[0], batch.ids[wrong[0].index]))
            else:
                future.set_result(offsets[at : at + some])
            at += some


def _size(
    payloads: Sequence[bytes],
    ids: Sequence[bytes | None] | None,
    headers: Sequence[bytes | None] | None,
) -> int:
    """Bytes of messages, as they travel."""
    size = sum(map(len, payloads)) + PER_MESSAGE * len(payloads)
    for column in (ids, headers):
        if column:
            size += sum(map(len, filter(None, column)))
    return size


def check_size(payloads: Sequence[bytes | str]) -> None:
    """Raise `StreamsError` with the code `TOO_LARGE` if messages without IDs and headers do not fit into a publish."""
    size = sum(len(one.encode() if isinstance(one, str) else one) for one in payloads)
    _check_bytes(HEADER + 4 * len(payloads) + size)


def _check_bytes(size: int) -> None:
    if size > MOST:
        raise StreamsError("TOO_LARGE", f"{size:,} bytes at once: {MOST:,} are the most")


def tell(future: asyncio.Future[Any], error: Exception) -> None:
    """Somebody waits for what has come to nothing."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # who does not wait for it need not hear of it


def _refusal(stream: str, refused: p.Refused, id: bytes | None) -> StreamsError:
    """Return what to say of a message that a node did not store because of its ID."""
    shown = (id or b"").decode("utf-8", "backslashreplace")
    if refused.code == "DUPLICATE_ID":
        return DuplicateIdError(
            f"the ID {shown!r} is taken by offset {refused.offset}", refused.offset
        )
    if refused.code == "ID_POOL_FULL":
        return StreamsError(
            refused.code,
            f"the message with ID {shown!r} is not stored: stream {stream!r} remembers as many IDs as its max_ids "
            "allows. Publish it again when some are older than id_box, or allow more "
            "(railgun stream ensure --max-ids)",
        )
    return StreamsError(refused.code, f"the message with ID {shown!r} is not stored")
