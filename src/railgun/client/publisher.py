"""Publish messages of a client: batch those of many tasks, send the batches, and send them again when that is safe.

Rules:

1. Messages that are published in one turn of the event loop travel as one batch, and so do messages that are published
   while the stream has as many publishes under way as are allowed. They are sent in the order in which they came.
2. Messages with IDs and messages without IDs do not travel together: only the former can be sent again when a
   connection is lost.
3. Messages that no task waits for any more, and that were never sent, are not sent. Staged pieces are sent all the
   same, as pieces behind them say how many messages lie before them; they are not sent when the sequence is dropped.
4. Publishes that were refused because there is no master, so that nothing was done, are sent again until their
   deadline, with or without IDs. When all publishes under way to the stream are answered, the refused ones are sent
   again in their order; until then nothing more is sent to the stream. The node refuses publishes that were on their
   way behind one that it has refused.
5. With `acks="none"` a task waits only until its publish is sent. Nodes answer such publishes at once, and they count
   as under way until then: so the messages that wait here are bounded by the tasks that wait. They are never sent
   again.
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

MAX_UNDER_WAY: Final = 4  # publishes of a stream that are not answered
FULL_BATCH_BYTES: Final = 256 << 10  # a batch of this size does not wait for more messages
MAX_PUBLISH_BYTES: Final = LARGEST - 4096
MAX_PUBLISH_MESSAGES: Final = 20_000  # this many fit, however long their IDs
MESSAGE_OVERHEAD_BYTES: Final = 12  # bytes of a batch for each message, besides payload and ID
RETRY_PAUSES_S: Final = (0.05, 0.5)  # pause after a refusal without a master: the first and longest
Acks = Literal["quorum", "master", "all", "none"]
_ACKS_VALUES: Final[dict[str, p.Acks]] = {
    "quorum": p.QUORUM, "master": p.MASTER, "all": p.ALL, "none": p.NONE,
}  # fmt: skip


def acks_value(acks: str) -> p.Acks:
    """Return the wire value of an `acks` setting: when a node answers a publish.

    >>> acks_value("quorum"), acks_value("all")
    (0, 2)
    >>> acks_value("some")
    Traceback (most recent call last):
    railgun.client.errors.StreamsError: acks is quorum, master, all or none, not 'some' (BAD_REQUEST)
    """
    value = _ACKS_VALUES.get(acks) if isinstance(acks, str) else None
    if value is None:
        raise StreamsError("BAD_REQUEST", f"acks is quorum, master, all or none, not {acks!r}")
    return value


class Batch:
    """Messages of one stream that are sent together; they wait to be sent, or to be answered."""

    __slots__ = (
        "acks", "again", "deadline", "frame", "futures", "headers", "ids", "payloads", "refusal", "safe", "size",
        "staging", "stream", "together", "topic", "unsent", "wanted",
    )  # fmt: skip

    def __init__(self, stream: str, topic: str, safe: bool, acks: p.Acks = p.QUORUM) -> None:
        self.stream = stream
        self.topic = topic
        self.acks = acks
        self.safe = safe and acks != p.NONE
        """Whether it can be sent twice without harm: each message has an ID, or all together have one."""
        self.payloads: list[bytes] = []
        self.ids: list[bytes | None] = []  # one for each message, or empty
        self.headers: list[bytes | None] = []
        self.futures: list[tuple[asyncio.Future[Any], int, float]] = []
        """The futures that wait: each with its number of messages and its deadline."""
        self.size = 0  # bytes
        self.deadline = math.inf  # the earliest deadline of the futures
        self.together = False  # one ID for the whole batch
        self.staging: p.Staging | None = None  # the sequence to stage the messages for
        self.wanted: Callable[[], bool] | None = None  # whether to send it with no task waiting
        self.again = False  # whether it may have been stored before
        self.refusal: StreamsError | None = None  # why the node did nothing
        self.frame = 0  # number of its frame in this connection; 0: not sent in this connection
        self.unsent = False  # the connection was lost before the frame was written

    def add(
        self,
        payloads: list[bytes],
        ids: list[bytes | None] | None,
        headers: Sequence[bytes | None] | None,
        size: int,
    ) -> None:
        """Add messages; `size` is their size in bytes."""
        before = len(self.payloads)
        self.payloads += payloads
        self.size += size
        for column, values in ((self.ids, ids), (self.headers, headers)):
            if values or column:
                column += [None] * (before - len(column))
                column += values or [None] * len(payloads)

    def wait(self, future: asyncio.Future[Any], count: int, deadline: float) -> None:
        """Register a future that waits for the next `count` messages, until `deadline`."""
        self.futures.append((future, count, deadline))
        if deadline < self.deadline:
            self.deadline = deadline

    def is_stored(self, code: str) -> bool:
        """Return whether a message that was not stored now is in the stream nevertheless, and that is no error."""
        return code == "OK" or (self.again and code == "DUPLICATE_ID")

    def can_add(self, safe: bool, size: int, acks: p.Acks) -> bool:
        """Return whether messages may be added.

        Messages with and without IDs are never mixed, as only the former can be sent again; nor are settings of `acks`.
        """
        fits = (
            self.size < FULL_BATCH_BYTES
            and self.size + size <= MAX_PUBLISH_BYTES
            and self.acks == acks
        )
        alone = self.together or self.staging is not None
        return fits and not alone and self.safe == (safe and acks != p.NONE)

    def split(self) -> Iterable[Batch]:
        """Yield the messages of each future as a batch of its own."""
        at = 0
        for future, count, deadline in self.futures:
            part = slice(at, at + count)
            payloads, ids, headers = self.payloads[part], self.ids[part], self.headers[part]
            at += count
            batch = Batch(self.stream, self.topic, self.safe, self.acks)
            batch.add(payloads, ids, headers, _size(payloads, ids, headers))
            batch.wait(future, count, deadline)
            yield batch

    @property
    def is_abandoned(self) -> bool:
        """Whether no task waits any more, and the batch need not be sent."""
        if self.wanted is not None and self.wanted():
            return False
        return all(future.done() for future, _, _ in self.futures)

    def fail(self, error: Exception) -> None:
        """Fail all futures with `error`."""
        for future, _, _ in self.futures:
            fail_future(future, error)

    def overdue(self, now: float) -> list[asyncio.Future[Any]]:
        """Return the futures whose deadline has passed, and find the next deadline."""
        if self.deadline > now:
            return []
        self.deadline = min(
            (end for future, _, end in self.futures if end >= now and not future.done()),
            default=math.inf,
        )
        return [future for future, _, deadline in self.futures if deadline < now]


class _Refused:
    """The refused publishes of a stream without a master, by their numbers."""

    __slots__ = ("numbers", "pauses", "timer", "why")

    def __init__(self) -> None:
        self.why = ""
        self.numbers: set[int] = set()
        self.pauses = Pauses(*RETRY_PAUSES_S)
        self.timer: asyncio.TimerHandle | None = None


class Publisher:
    """All publishes of a client."""

    def __init__(self, client: Client, numbers: Iterator[int]) -> None:
        self._client = client
        self._numbers = numbers
        self._waiting: dict[tuple[str, str], deque[Batch]] = {}  # all but the last are full
        self._under_way: dict[int, Batch] = {}
        self._counts: dict[str, int] = {}  # publishes under way, by stream
        self._held: dict[str, _Refused] = {}

    # ------------------------------------------------------------ the connection

    def resume(self) -> None:
        """Use a new connection: send again what can be sent again, and send what waits."""
        for number, batch in list(self._under_way.items()):
            if batch.refusal is None and not batch.unsent:
                batch.again = True
            elif batch.is_abandoned:
                self._done(number)
                continue
            batch.refusal = None
            batch.unsent = False
            try:
                self._send_batch(number, batch)
            except Exception as error:  # only this batch fails
                self._done(number).fail(error)
        for key in list(self._waiting):
            self._try_send(key)

    def go_on(self) -> None:
        """Send what waits, as the connection is known to be alive again."""
        for stream in list(self._held):
            self._schedule_retry(stream)
        for key in list(self._waiting):
            self._try_send(key)

    def cut_off(self, error: StreamsError, written: int) -> None:
        """Handle the loss of the connection, to which the first `written` frames had been written."""
        for held in self._held.values():
            if held.timer is not None:
                held.timer.cancel()
        self._held.clear()
        for number, batch in list(self._under_way.items()):
            batch.unsent |= batch.refusal is None and batch.frame > written and batch.acks != p.NONE
            batch.frame = 0
            if self._client.closing or not (batch.refusal or batch.unsent):
                self._fail_unless_safe(number, error)

    def _fail_unless_safe(self, number: int, error: StreamsError) -> None:
        """Fail a publish whose outcome is an error or unknown, unless it can be sent again safely."""
        if self._client.closing or not self._under_way[number].safe:
            self._done(number).fail(error)

    def close(self) -> None:
        """Fail all publishes that were never sent."""
        closed = StreamsError("CLOSED", "the client is closed")
        for batch in self._batches():
            batch.fail(closed)
        self._waiting.clear()

    # ------------------------------------------------------------ who waits

    def _batches(self) -> Iterable[Batch]:
        return itertools.chain(*self._waiting.values(), self._under_way.values())

    def pending(self) -> list[asyncio.Future[Any]]:
        """Return the futures of all publishes that are not done."""
        waiting = (future for batch in self._batches() for future, _, _ in batch.futures)
        return [future for future in waiting if not future.done()]

    @property
    def awaits_answers(self) -> bool:
        """Whether publishes that were sent are not answered yet."""
        return any(batch.refusal is None for batch in self._under_way.values())

    @property
    def refusal_text(self) -> str:
        """Why publishes that were sent are not stored yet, as a node reported it; empty if no node has."""
        return next((held.why for held in self._held.values() if held.why), "")

    def overdue(self, now: float) -> list[tuple[asyncio.Future[Any], Exception]]:
        """Return the futures whose deadline has passed, each with its error: the refusal, if nothing was stored."""
        return [
            (future, TimeoutError() if batch.again else batch.refusal or TimeoutError())
            for batch in self._batches()
            for future in batch.overdue(now)
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
        """Publish messages, in as many publishes as necessary."""
        totals = list(itertools.accumulate(map(len, payloads)))
        futures, at, before = [], 0, 0
        while at < len(payloads):
            end = min(
                bisect_left(totals, before + FULL_BATCH_BYTES, at) + 1, at + MAX_PUBLISH_MESSAGES
            )
            part = ids[at:end] if ids else None
            futures.append(self.put(stream, topic, payloads[at:end], part, None, deadline, acks))
            at, before = end, totals[min(end, len(totals)) - 1]
        return futures

    def put_one(
        self, stream: str, topic: str, payload: bytes, deadline: float, acks: p.Acks = p.QUORUM
    ) -> asyncio.Future[Any]:
        """Publish one message without an ID or headers. This is the shortest way, as most messages are such."""
        queue = self._waiting.get((stream, topic))
        size = len(payload) + MESSAGE_OVERHEAD_BYTES
        batch = queue[-1] if queue else None
        if batch is None or batch.ids or batch.headers or not batch.can_add(False, size, acks):
            return self.put(stream, topic, [payload], None, None, deadline, acks)
        batch.payloads.append(payload)
        batch.size += size
        future: asyncio.Future[Any] = self._client.loop.create_future()
        batch.wait(future, 1, deadline)
        if batch.size >= FULL_BATCH_BYTES:
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
        """Publish messages of one task; the future returns their offsets."""
        key = (stream, topic)
        size = _size(payloads, ids, headers)
        queue = self._queue(key)
        safe = ids is not None and all(ids)
        if not queue or not queue[-1].can_add(safe, size, acks):
            queue.append(Batch(stream, topic, safe, acks))
        batch = queue[-1]
        future: asyncio.Future[Any] = self._client.loop.create_future()
        batch.add(payloads, ids, headers, size)
        batch.wait(future, len(payloads), deadline)
        if batch.size >= FULL_BATCH_BYTES:
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
        """Publish messages that are stored all together or not at all."""
        ids = [id, *[None] * (len(payloads) - 1)]
        batch = Batch(stream, "", True, acks)
        batch.together = True
        batch.add(payloads, ids, None, _size(payloads, ids, None))
        queue = self._queue((stream, ""))
        future: asyncio.Future[Any] = self._client.loop.create_future()
        batch.wait(future, len(payloads), deadline)
        queue.append(batch)
        return future

    def put_staged(
        self,
        stream: str,
        payloads: list[bytes],
        staging: p.Staging,
        deadline: float,
        wanted: Callable[[], bool] | None = None,
    ) -> asyncio.Future[Any]:
        """Stage messages, which no consumer sees before their producer commits them; they may be sent again.

        `wanted`: returns whether to send them when no task waits for them any more. Raises `StreamsError` with the code
        `TOO_LARGE`.
        """
        check_size(payloads)
        batch = Batch(stream, "", True)
        batch.staging, batch.wanted = staging, wanted
        batch.add(payloads, None, None, _size(payloads, None, None))
        future: asyncio.Future[Any] = self._client.loop.create_future()
        batch.wait(future, len(payloads), deadline)
        self._queue((stream, "")).append(batch)
        self._try_send((stream, ""))
        return future

    def _queue(self, key: tuple[str, str]) -> deque[Batch]:
        """Return the batches that wait to be sent to a stream, and schedule their sending if there were none."""
        if self._client.closing:
            raise StreamsError("CLOSED", "the client is closed")
        queue = self._waiting.get(key)
        if queue is None:
            queue = self._waiting[key] = deque()
            self._client.loop.call_soon(self._try_send, key)
        return queue

    def _try_send(self, key: tuple[str, str]) -> None:
        """Send the batches that wait, unless enough publishes are under way and the next batch is small."""
        queue = self._waiting.get(key)
        while queue and self._client.may_send():
            held = self._held.get(key[0])
            if held is not None and held.numbers:
                return
            under_way = self._counts.get(key[0], 0)
            if under_way >= MAX_UNDER_WAY or (under_way > 1 and queue[0].size < FULL_BATCH_BYTES):
                return
            batch = queue.popleft()
            if not queue:
                del self._waiting[key]
            if batch.is_abandoned:
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
                queue.extendleft(reversed(list(batch.split())))  # one is invalid: find it
                self._waiting[key] = queue

    def _send_batch(self, number: int, batch: Batch) -> None:
        blobs = [build(batch.payloads, batch.ids or None, batch.headers or None)]
        _check_bytes(len(blobs[0]))
        publish = p.Publish(
            request=number,
            stream=batch.stream,
            topic=batch.topic,
            together=batch.together,
            acks=batch.acks,
            staging=batch.staging,
        )
        self._client.send(publish, blobs)
        batch.frame = self._client.frames

    # ------------------------------------------------------------ answers

    def answered(self, answer: p.Published | p.Failed) -> bool:
        """Handle an answer of the node; return whether it is the answer to a publish."""
        if answer.request not in self._under_way:
            return False
        if isinstance(answer, p.Published):
            self._published(answer)
        else:
            error = StreamsError(answer.code, answer.text, answer.no_quorum)
            batch = self._under_way[answer.request]
            if answer.code == "CLOSED":
                self._fail_unless_safe(answer.request, error)
            elif batch.acks != p.NONE and self._client.tries_again(error, idempotent=batch.safe):
                self._hold(answer.request, error)
            else:
                self._done(answer.request).fail(error)
        return True

    def _hold(self, number: int, error: StreamsError) -> None:
        """Keep a publish that was refused because the stream has no master, to send it again."""
        batch = self._under_way[number]
        batch.again |= not error.nothing_done
        batch.refusal = error
        held = self._held.setdefault(batch.stream, _Refused())
        held.why = str(error)
        held.numbers.add(number)
        self._schedule_retry(batch.stream)

    def _schedule_retry(self, stream: str) -> None:
        """Schedule the refused publishes of a stream to be sent again, if all that were under way are refused."""
        held = self._held.get(stream)
        if held is None or not held.numbers or held.timer is not None:
            return
        if len(held.numbers) >= self._counts[stream]:
            held.timer = self._client.loop.call_later(held.pauses.next(), self._retry, stream)

    def _retry(self, stream: str) -> None:
        held = self._held[stream]
        held.timer = None
        if not self._client.may_send():
            return  # `resume` or `go_on` sends later
        numbers, held.numbers = sorted(held.numbers), set()
        for number in numbers:
            batch = self._under_way[number]
            if batch.is_abandoned:
                self._done(number)
                continue
            batch.refusal = None
            self._send_batch(number, batch)

    def _done(self, number: int) -> Batch:
        batch = self._under_way.pop(number)
        self._counts[batch.stream] -= 1
        if batch.stream in self._held:
            self._held[batch.stream].numbers.discard(number)
            self._schedule_retry(batch.stream)
        for key in [key for key in self._waiting if key[0] == batch.stream]:
            self._client.loop.call_soon(self._try_send, key)
        return batch

    def _published(self, answer: p.Published) -> None:
        batch = self._done(answer.request)
        if batch.stream in self._held and not self._held[batch.stream].numbers:
            del self._held[batch.stream]  # the stream has a master again
        count = len(batch.payloads)
        if not answer.stored and not answer.refused:  # ephemeral
            for future, size, _ in batch.futures:
                if not future.done():
                    future.set_result([answer.matched] * size)
            return
        offsets: list[int] = list(range(answer.base, answer.base + count))
        refused = {refusal.index: refusal for refusal in answer.refused}
        if refused and batch.together:
            base = answer.refused[0].offset
            offsets = list(range(base, base + count))
        elif refused:
            following = itertools.count(answer.base)
            offsets = [refused[n].offset if n in refused else next(following) for n in range(count)]
        at = 0
        for future, size, _ in batch.futures:
            errors = [
                refused[n]
                for n in range(at, at + size)
                if n in refused and not batch.is_stored(refused[n].code)
            ] if refused else []  # fmt: skip
            if future.done():
                pass
            elif errors:
                future.set_exception(_refusal(batch.stream, errors[0], batch.ids[errors[0].index]))
            else:
                future.set_result(offsets[at : at + size])
            at += size


def _size(
    payloads: Sequence[bytes],
    ids: Sequence[bytes | None] | None,
    headers: Sequence[bytes | None] | None,
) -> int:
    """Return the size of messages in a publish, in bytes."""
    size = sum(map(len, payloads)) + MESSAGE_OVERHEAD_BYTES * len(payloads)
    for column in (ids, headers):
        if column:
            size += sum(map(len, filter(None, column)))
    return size


def check_size(payloads: Sequence[bytes | str]) -> None:
    """Raise `StreamsError` with the code `TOO_LARGE` if messages without IDs and headers do not fit into a publish."""
    size = sum(len(text.encode() if isinstance(text, str) else text) for text in payloads)
    _check_bytes(HEADER + 4 * len(payloads) + size)


def _check_bytes(size: int) -> None:
    if size > MAX_PUBLISH_BYTES:
        raise StreamsError(
            "TOO_LARGE",
            f"{size:,} bytes are too many for one publish: the most are {MAX_PUBLISH_BYTES:,}",
        )


def fail_future(future: asyncio.Future[Any], error: Exception) -> None:
    """Fail a future with `error`, unless it is done."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # no warning if no task waits for the future


def _refusal(stream: str, refused: p.Refused, id: bytes | None) -> StreamsError:
    """Return the error for a message that a node did not store because of its ID."""
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
