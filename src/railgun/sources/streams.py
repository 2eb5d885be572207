"""Read persistent streams of a node as a source of a flow.

Rules:

1. A part is a stream, by its name; the position is the offset of the next message, with the identity of the stream. So
   a stream is read by one worker at a time, in order, and to move it is to send a number. A stream that was deleted and
   made anew is a different stream: that is an error (`missing="skip"`: it is read from its start). Positions of older
   snapshots are offsets alone, and are accepted as they are. A position never moves back within a stream.
2. Nothing is acknowledged and no consumer group is made: the flow saves the position with its snapshots.
3. Messages that were deleted before they were read are an error, never skipped silently (`missing="skip"`: they are
   skipped).
4. The source waits for a node that is gone for a while, and for a cluster without a leader or master: whatever fails
   with a code that may pass (`transport.error_codes`) is tried again, and `client.outages` lists what is waited for.
   Records are read ahead up to a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import fnmatch
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from railgun.client.address import DATA
from railgun.client.errors import StreamsError, refuse_damaged
from railgun.client.nodes import Pauses
from railgun.client.outages import OUTAGES
from railgun.client.payloads import from_json, from_msgpack
from railgun.client.retries import PAUSES_S
from railgun.client.retrying_client import PREFETCH, RetryingClient
from railgun.client.shared import SHARED_CLIENTS, NodeAddress
from railgun.engine.operators.operator import shorten
from railgun.errors import said
from railgun.flows.errors import ConnectorError
from railgun.flows.source import Reader, Source

if TYPE_CHECKING:
    from railgun.client.subscription import Subscription
    from railgun.client.sync import SyncClient
    from railgun.transport.records import Records

READ_AHEAD_MESSAGES: Final = 40_000  # at most, before the flow takes them
REPLACED: Final = "STREAM_REPLACED"
Format = Literal["json", "text", "bytes", "msgpack", "message"]


class StreamMessage(NamedTuple):
    """A message with its metadata (`format="message"`)."""

    stream: str
    offset: int
    time: int
    """When the message was stored (µs)."""
    id: bytes | None
    headers: bytes
    payload: bytes


def _messages(stream: str, records: Records) -> list[StreamMessage]:
    rows = zip(records.ids(), records.all_headers(), records.payloads(), strict=True)
    return [
        StreamMessage(stream, offset, records.time, *row)
        for offset, row in enumerate(rows, records.base)
    ]


_DECODE: Final[dict[str, Callable[[bytes], Any]]] = {
    "json": from_json, "text": bytes.decode, "bytes": bytes, "msgpack": from_msgpack,
}  # fmt: skip


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Raise errors of a node as `ConnectorError`; the cause of one that may pass is an `OSError`."""
    try:
        yield
    except StreamsError as error:
        cause: Exception = error
        if error.may_pass and not isinstance(error, OSError):
            cause = ConnectionError(str(error))
        raise ConnectorError(f"{name}: {error}") from cause


class Streams(Source[Any]):
    """A source of the messages of persistent streams, by their names or by patterns (`orders.*`).

    >>> Streams("orders", format="xml")
    Traceback (most recent call last):
    railgun.flows.errors.ConnectorError: Streams('orders') reads 'json', 'text', 'bytes', 'msgpack' or ...

    `follow=False`: each part ends at the end that its stream has when it is opened. `node`: "host:port", with its
    `secret`; by default, the node that works in the directory `data`.
    """

    def __init__(
        self,
        *names: str,
        format: Format = "json",
        start: Literal["start", "end"] = "start",
        follow: bool = True,
        missing: Literal["error", "skip"] = "error",
        node: str | None = None,
        secret: bytes | str | None = None,
        data: str | Path = DATA,
    ) -> None:
        self.names = names
        if not names:
            raise ConnectorError("Streams() needs the names of streams: Streams('orders')")
        if format not in (*_DECODE, "message"):
            raise ConnectorError(
                f"{self} reads 'json', 'text', 'bytes', 'msgpack' or 'message', not {format!r}"
            )
        if start not in ("start", "end") or missing not in ("error", "skip"):
            raise ConnectorError(
                f"{self} begins at 'start' or 'end', not {start!r}; missing is 'error' or 'skip', "
                f"not {missing!r}"
            )
        self.format = format
        self.start = start
        self.follow = follow
        self.missing = missing
        self.node = NodeAddress(node, secret, data)
        self.bounded = not (follow and any(map(_is_pattern, names)))
        self.ends: dict[str, int] | None = None  # of the streams, if they are fixed (`as_of_now`)

    def __str__(self) -> str:
        return f"Streams({', '.join(map(repr, self.names))})"

    def partitions(self) -> Iterable[str]:
        """Return the given names, and for patterns the names of the streams that exist now."""
        if self.ends is not None:
            return list(self.ends)
        plain = [name for name in self.names if not _is_pattern(name)]
        patterns = [name for name in self.names if _is_pattern(name)]
        if not patterns:
            return plain
        with named(str(self)), SHARED_CLIENTS.use(self.node) as client:
            listed = RetryingClient(client, str(self)).admin("list")
        matches = [
            stream["name"]
            for stream in listed
            if stream["settings"]["kind"] == "persistent"
            and not stream["name"].startswith("_")
            and any(fnmatch.fnmatchcase(stream["name"], pattern) for pattern in patterns)
        ]
        return dict.fromkeys([*plain, *matches])

    def as_of_now(self) -> Streams:
        """Return a source of the streams that exist now, up to their present ends."""
        now = copy.copy(self)
        with named(str(self)), SHARED_CLIENTS.use(self.node) as client:
            node = RetryingClient(client, str(self))
            statuses = {name: node.admin("describe", name=name) for name in self.partitions()}
            for status in statuses.values():
                refuse_damaged(status)
            now.ends = {name: status["end"] for name, status in statuses.items()}
        now.bounded = True
        return now

    def open(self, partition: Any, position: Any) -> Reader[Any]:
        """Read one stream, from an offset on."""
        return _Reader(self, partition, position)


def _is_pattern(name: str) -> bool:
    return any(letter in name for letter in "*?[")


class _Reader(Reader[Any]):
    def __init__(self, source: Streams, stream: str, position: int | None) -> None:
        self.source = source
        self.stream = stream
        self.end: int | None = None
        self._items: Sequence[Any] = ()
        self._row = 0
        self._name = f"Streams({stream!r})"
        self._in_outage = False
        self._skips = source.missing == "skip"
        with named(self._name):
            self._client = SHARED_CLIENTS.take(source.node)
        try:
            offset, self._identity = _parts_of(position)
            at_end = offset is None and source.start == "end"
            if source.ends is not None:
                self.end = end = source.ends[stream]
            elif not source.follow or at_end:
                with named(self._name):
                    node = RetryingClient(self._client, self._name)
                    status = node.admin("describe", name=stream)
                    end = status["end"]
                    if not source.follow:
                        refuse_damaged(status)
                self.end = None if source.follow else end
            if at_end:
                offset = end
                self._identity = status.get("identity", "") if source.ends is None else ""
            self._offset = offset
            self._feed = _Feed(self._client, stream, offset, self._identity, self._skips)
        except BaseException:
            SHARED_CLIENTS.release(self._client)
            raise

    @property
    def position(self) -> Any:
        """Return the position: None before anything was read; the offset alone if the node knows no identity."""
        if self._offset is None or not self._identity:
            return self._offset
        return {"offset": self._offset, "identity": self._identity}

    def read(self, most: int, now: int) -> Sequence[Any] | None:
        if self._row == len(self._items):
            if self.end is not None and (self._offset or 0) >= self.end:
                return None
            batch = self._feed.take()
            if batch is None:
                with named(self._name):
                    self._feed.check()
                self._note_outage()
                return []
            self._take(*batch)
        items = self._items[self._row : self._row + most]
        if self.end is not None:
            items = items[: self.end - (self._offset or 0)]
        self._row += len(items)
        self._offset = (self._offset or 0) + len(items)
        return items

    def _note_outage(self) -> None:
        """Note whether an outage is the reason why no messages come."""
        trouble = self._feed.trouble
        if trouble:
            OUTAGES.begin(self._name, trouble)
        elif self._in_outage:
            OUTAGES.end(self._name)
        self._in_outage = bool(trouble)

    def _take(self, records: Records, identity: str) -> None:
        if self._in_outage:
            OUTAGES.end(self._name)
            self._in_outage = False
        expected = self._offset
        replaced = bool(identity and self._identity and identity != self._identity)
        if expected is not None and records.base < expected and not replaced:
            raise ConnectorError(
                f"{self._name}: offset {records.base} came where {expected} was expected, and nothing is read twice. "
                "If the stream was deleted and made anew, start the flow without its snapshots, or under a new name"
            )
        if expected is not None and records.base != expected and not self._skips:
            raise ConnectorError(
                f"{self._name}: messages {expected} to {records.base - 1} were deleted before the flow read them. Let "
                "the stream keep more (max_age, max_bytes), or go on without them: Streams(..., missing='skip')"
            )
        self._offset, self._identity = records.base, identity
        if self.source.format == "message":
            self._items, self._row = _messages(self.stream, records), 0
            return
        items: list[Any] = []
        payloads = records.payloads()
        try:
            items.extend(map(_DECODE[self.source.format], payloads))
        except ValueError as error:
            raise ConnectorError(
                f"{self._name}, offset {records.base + len(items)}: {shorten(payloads[len(items)])} is not "
                f"{self.source.format}: {said(error)}. To go on without such messages read them as bytes, and decode "
                "them with .map(..., on_error='dead_letter')"
            ) from error
        self._items, self._row = items, 0

    def close(self) -> None:
        OUTAGES.end(self._name)
        self._feed.close()
        SHARED_CLIENTS.release(self._client)


def _parts_of(position: Any) -> tuple[int | None, str]:
    """Return the offset and the stream's identity of a position; older positions are offsets alone.

    >>> _parts_of({"offset": 7, "identity": "a1"}), _parts_of(7), _parts_of(None)
    ((7, 'a1'), (7, ''), (None, ''))
    """
    if isinstance(position, dict):
        return int(position["offset"]), str(position.get("identity", ""))
    return position, ""


class _Feed:
    """Reads a stream ahead of the flow, in the thread of the client."""

    def __init__(
        self, client: SyncClient, stream: str, position: int | None, identity: str, skips: bool
    ) -> None:
        self._client = client
        self._stream, self._identity, self._skips = stream, identity, skips
        self._queue: deque[tuple[Records, str]] = deque()
        self._queued = 0
        self._lock = threading.Lock()
        self._has_room = asyncio.Event()
        self._subscription: Subscription | None = None
        self._refusal = ""  # why there is no subscription yet
        self._work = asyncio.run_coroutine_threadsafe(self._run(position), client.loop)

    async def _run(self, position: int | None) -> None:
        while True:
            async with await self._subscribe(position) as sub:
                self._subscription, self._identity = sub, sub.identity
                try:
                    while True:
                        records = await sub.records()
                        position = records.end
                        await self._add(records, sub.identity)
                except StreamsError as error:
                    self._subscription = None
                    # If this does not raise, there was a reconnect, and the next messages were deleted meanwhile.
                    self._raise_lasting(error)
                    if error.code == REPLACED:
                        position, self._identity = None, ""

    async def _subscribe(self, position: int | None) -> Subscription:
        """Subscribe from `position` on; or from what is left, and the reader will notice what is missing."""
        client, pauses = self._client.client, Pauses(*PAUSES_S)
        start: int | Literal["start"] = "start" if position is None else position
        while True:
            try:
                subscription = await client.subscribe(
                    self._stream, start=start, prefetch=PREFETCH, identity=self._identity
                )
                self._refusal = ""
                return subscription
            except StreamsError as error:
                self._raise_lasting(error)
                self._refusal = str(error)
                if error.code == REPLACED:
                    start, self._identity = "start", ""
                    continue
                if error.code == "OFFSET_OUT_OF_RANGE" and position is not None:
                    start = await self._first(position, error)
            await asyncio.sleep(pauses.next())

    async def _first(self, position: int, error: StreamsError) -> int:
        """Return the first offset that is left, which is behind `position`; raise `error` if it is not."""
        try:
            first = int((await self._client.client.describe(self._stream))["first"])
        except StreamsError as unknown:
            self._raise_lasting(unknown)
            return position
        if first <= position:
            raise error
        return first

    def _raise_lasting(self, error: StreamsError) -> None:
        """Raise an error that would occur again."""
        if error.may_pass and not self._client.client.closing:
            return
        if error.code != "OFFSET_OUT_OF_RANGE" and not (self._skips and error.code == REPLACED):
            raise error

    @property
    def trouble(self) -> str:
        """Return why no messages come, if the reason may pass; else an empty text."""
        return self._refusal or (self._subscription.trouble if self._subscription else "")

    async def _add(self, records: Records, identity: str) -> None:
        with self._lock:
            self._queue.append((records, identity))
            self._queued += records.count
            full = self._queued >= READ_AHEAD_MESSAGES
        if full:
            self._has_room.clear()
            await self._has_room.wait()

    def take(self) -> tuple[Records, str] | None:
        """Return the next batch and the identity of its stream, or None if no batch has come."""
        with self._lock:
            if not self._queue:
                return None
            records, identity = self._queue.popleft()
            queued_before, self._queued = self._queued, self._queued - records.count
        if queued_before >= READ_AHEAD_MESSAGES:
            self._client.loop.call_soon_threadsafe(self._has_room.set)
        return records, identity

    def check(self) -> None:
        """Raise the error that has ended the reading, if it has ended."""
        if self._work.done():
            self._work.result()
            raise StreamsError("CLOSED", "the stream is not read any more")

    def close(self) -> None:
        self._work.cancel()
