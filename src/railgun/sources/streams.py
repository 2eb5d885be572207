"""Read persistent streams of a node as a source of a flow.

Rules:

1. A part is a stream, by its name; the position is the offset of the next message, with the identity of the stream. So
   a stream is read by one worker at a time, in order, and moves to another at the cost of a number. A stream that was
   deleted and made anew is another one: that is an error (`missing="skip"`: it is read from its start). Positions of
   older snapshots are offsets alone, and are taken as they are. A position never moves back within a stream.
2. Nothing is acked and no group is made: the position is the flow's, saved with its snapshots.
3. Messages that were deleted before they were read are an error, never passed over in silence (`missing="skip"`: they
   are).
4. A node that is gone for a while is waited for, and so is a cluster without a leader or master: whatever fails with a
   code that may pass (`transport.error_codes`) is tried again, and `client.outages` knows what is waited for. The
   records read ahead stay within bounds.
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

AHEAD: Final = 40_000  # messages read ahead of the flow
REPLACED: Final = "STREAM_REPLACED"
Format = Literal["json", "text", "bytes", "msgpack", "message"]


class StreamMessage(NamedTuple):
    """A message with all there is to it (`format="message"`)."""

    stream: str
    offset: int
    time: int
    """When it was stored (µs)."""
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
def named(who: str) -> Iterator[None]:
    """What a node refuses becomes an error of the flow; what may pass is known to be such."""
    try:
        yield
    except StreamsError as error:
        cause: Exception = error
        if error.may_pass and not isinstance(error, OSError):
            cause = ConnectionError(str(error))
        raise ConnectorError(f"{who}: {error}") from cause


class Streams(Source[Any]):
    """The messages of persistent streams, by their names or by patterns (`orders.*`).

    >>> Streams("orders", format="xml")
    Traceback (most recent call last):
    railgun.flows.errors.ConnectorError: Streams('orders') reads 'json', 'text', 'bytes', 'msgpack' or ...

    `follow=False`: the source ends where a stream ends when it is opened. `node`: "host:port", with its `secret`;
    without, the node that works in the directory `data`.
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
            raise ConnectorError("Streams() of which names? Streams('orders')")
        if format not in (*_DECODE, "message"):
            raise ConnectorError(
                f"{self} reads 'json', 'text', 'bytes', 'msgpack' or 'message', not {format!r}"
            )
        if start not in ("start", "end") or missing not in ("error", "skip"):
            raise ConnectorError(
                f"{self} begins at 'start' or 'end', not {start!r}; what is missing is an 'error', or to 'skip', "
                f"not {missing!r}"
            )
        self.format = format
        self.start = start
        self.follow = follow
        self.missing = missing
        self.node = NodeAddress(node, secret, data)
        self.bounded = not (follow and any(map(_is_pattern, names)))
        self.ends: dict[str, int] | None = None  # if it is bounded by what was there at some time

    def __str__(self) -> str:
        return f"Streams({', '.join(map(repr, self.names))})"

    def partitions(self) -> Iterable[str]:
        """The names, and those of the streams that are there now for patterns."""
        if self.ends is not None:
            return list(self.ends)
        plain = [name for name in self.names if not _is_pattern(name)]
        patterns = [name for name in self.names if _is_pattern(name)]
        if not patterns:
            return plain
        with named(str(self)), SHARED_CLIENTS.use(self.node) as client:
            listed = RetryingClient(client, str(self)).admin("list")
        found = [
            one["name"]
            for one in listed
            if one["settings"]["kind"] == "persistent"
            and not one["name"].startswith("_")
            and any(fnmatch.fnmatchcase(one["name"], pattern) for pattern in patterns)
        ]
        return dict.fromkeys([*plain, *found])

    def as_of_now(self) -> Streams:
        """The streams there are, up to where they end."""
        now = copy.copy(self)
        with named(str(self)), SHARED_CLIENTS.use(self.node) as client:
            node = RetryingClient(client, str(self))
            told = {name: node.admin("describe", name=name) for name in self.partitions()}
            for one in told.values():
                refuse_damaged(one)
            now.ends = {name: one["end"] for name, one in told.items()}
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
        self._who = f"Streams({stream!r})"
        self._waiting = False
        self._skips = source.missing == "skip"
        with named(self._who):
            self._client = SHARED_CLIENTS.take(source.node)
        try:
            offset, self._identity = _parts_of(position)
            at_end = offset is None and source.start == "end"
            if source.ends is not None:
                self.end = end = source.ends[stream]
            elif not source.follow or at_end:
                with named(self._who):
                    node = RetryingClient(self._client, self._who)
                    told = node.admin("describe", name=stream)
                    end = told["end"]
                    if not source.follow:
                        refuse_damaged(told)
                self.end = None if source.follow else end
            if at_end:
                offset = end
                self._identity = told.get("identity", "") if source.ends is None else ""
            self._offset = offset
            self._feed = _Feed(self._client, stream, offset, self._identity, self._skips)
        except BaseException:
            SHARED_CLIENTS.release(self._client)
            raise

    @property
    def position(self) -> Any:
        """Where the reader stands: None before anything was read; the offset alone if the node knows no identity."""
        if self._offset is None or not self._identity:
            return self._offset
        return {"offset": self._offset, "identity": self._identity}

    def read(self, most: int, now: int) -> Sequence[Any] | None:
        if self._row == len(self._items):
            if self.end is not None and (self._offset or 0) >= self.end:
                return None
            found = self._feed.take()
            if found is None:
                with named(self._who):
                    self._feed.check()
                self._waits()
                return []
            self._take(*found)
        items = self._items[self._row : self._row + most]
        if self.end is not None:
            items = items[: self.end - (self._offset or 0)]
        self._row += len(items)
        self._offset = (self._offset or 0) + len(items)
        return items

    def _waits(self) -> None:
        """Note whether an outage is the reason why nothing comes."""
        trouble = self._feed.trouble
        if trouble:
            OUTAGES.begin(self._who, trouble)
        elif self._waiting:
            OUTAGES.end(self._who)
        self._waiting = bool(trouble)

    def _take(self, records: Records, identity: str) -> None:
        if self._waiting:
            OUTAGES.end(self._who)
            self._waiting = False
        expected = self._offset
        replaced = bool(identity and self._identity and identity != self._identity)
        if expected is not None and records.base < expected and not replaced:
            raise ConnectorError(
                f"{self._who}: offset {records.base} came where {expected} was expected, and nothing is read twice. "
                "If the stream was deleted and made anew, start the flow without its snapshots, or under a new name"
            )
        if expected is not None and records.base != expected and not self._skips:
            raise ConnectorError(
                f"{self._who}: messages {expected} to {records.base - 1} were deleted before the flow read them. Let "
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
                f"{self._who}, offset {records.base + len(items)}: {shorten(payloads[len(items)])} is not "
                f"{self.source.format}: {said(error)}. To go on without such messages read them as bytes, and decode "
                "them with .map(..., on_error='dead_letter')"
            ) from error
        self._items, self._row = items, 0

    def close(self) -> None:
        OUTAGES.end(self._who)
        self._feed.close()
        SHARED_CLIENTS.release(self._client)


def _parts_of(position: Any) -> tuple[int | None, str]:
    """Return the offset and the stream's identity of a position; older ones are offsets alone.

    >>> _parts_of({"offset": 7, "identity": "a1"}), _parts_of(7), _parts_of(None)
    ((7, 'a1'), (7, ''), (None, ''))
    """
    if isinstance(position, dict):
        return int(position["offset"]), str(position.get("identity", ""))
    return position, ""


class _Feed:
    """Reads a stream ahead, in the thread of the client."""

    def __init__(
        self, client: SyncClient, stream: str, position: int | None, identity: str, skips: bool
    ) -> None:
        self._client = client
        self._stream, self._identity, self._skips = stream, identity, skips
        self._queue: deque[tuple[Records, str]] = deque()
        self._queued = 0
        self._lock = threading.Lock()
        self._room = asyncio.Event()
        self._subscription: Subscription | None = None
        self._refusal = ""  # why there is none yet
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
                    self._refused(
                        error
                    )  # else: a reconnect, and what comes next was deleted meanwhile
                    if error.code == REPLACED:
                        position, self._identity = None, ""

    async def _subscribe(self, position: int | None) -> Subscription:
        """From there on; or from what is left, and the reader will see what is missing."""
        client, pauses = self._client.client, Pauses(*PAUSES_S)
        start: int | Literal["start"] = "start" if position is None else position
        while True:
            try:
                made = await client.subscribe(
                    self._stream, start=start, prefetch=PREFETCH, identity=self._identity
                )
                self._refusal = ""
                return made
            except StreamsError as error:
                self._refused(error)
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
            self._refused(unknown)
            return position
        if first <= position:
            raise error
        return first

    def _refused(self, error: StreamsError) -> None:
        """Raise an error that would come again."""
        if error.may_pass and not self._client.client.closing:
            return
        if error.code != "OFFSET_OUT_OF_RANGE" and not (self._skips and error.code == REPLACED):
            raise error

    @property
    def trouble(self) -> str:
        """Why nothing comes, if that is for a reason that may pass."""
        return self._refusal or (self._subscription.trouble if self._subscription else "")

    async def _add(self, records: Records, identity: str) -> None:
        with self._lock:
            self._queue.append((records, identity))
            self._queued += records.count
            full = self._queued >= AHEAD
        if full:
            self._room.clear()
            await self._room.wait()

    def take(self) -> tuple[Records, str] | None:
        """The next batch, if there is one, and the identity of its stream."""
        with self._lock:
            if not self._queue:
                return None
            records, identity = self._queue.popleft()
            was, self._queued = self._queued, self._queued - records.count
        if was >= AHEAD:
            self._client.loop.call_soon_threadsafe(self._room.set)
        return records, identity

    def check(self) -> None:
        """Raise what has made an end of it."""
        if self._work.done():
            self._work.result()
            raise StreamsError("CLOSED", "the stream is not read any more")

    def close(self) -> None:
        self._work.cancel()
