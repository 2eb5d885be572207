"""Fetch a range of a stream from the node to a task, in batches as they are on the node's disk.

Rules:

1. A range is read by a subscription without a group: nothing is acknowledged, and no group's position moves.
2. While one list of batches is worked on, the next is fetched; what is read ahead is bounded in bytes.
3. Messages that were deleted before they were read are an error, or skipped if the option `missing` says so.
4. If a node goes away, the task waits for it as long as one call may take (`timeout`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from railgun.client.address import Address
from railgun.client.errors import StreamsError
from railgun.client.sync import SyncClient, connect_to
from railgun.spark.streams.errors import MissingMessagesError, StreamSourceError, node_errors
from railgun.transport.records import Records

if TYPE_CHECKING:
    from railgun.client.subscription import Subscription

READ_AHEAD_BYTES: Final = 24 << 20  # of messages that may be under way
LIST_BYTES: Final = 32 << 20  # of messages, after which a list ends
# A query waits at least so long for an outage of its nodes to pass.
OUTAGE_S: Final = 120.0
PREFETCH_MESSAGES: Final = (200, 200_000)  # under way: at least, and at most


class Span(NamedTuple):
    """Consecutive messages of a batch: rows `low` up to `high`."""

    records: Records
    low: int
    high: int

    @property
    def first(self) -> int:
        """Return the offset of the first message."""
        return self.records.base + self.low

    def __len__(self) -> int:
        return self.high - self.low


class Range(NamedTuple):
    """The offsets of a stream to read: from `first` up to `end`, which is not included."""

    stream: str
    first: int
    end: int
    size: int = 0
    """The bytes of a message, about."""
    identity: str = ""
    """The identity of the stream, which changes when the stream is deleted and made anew. Empty: not known."""

    def __str__(self) -> str:
        return f"railgun, stream {self.stream!r}, offsets {self.first} to {self.end}"


@contextlib.contextmanager
def connected(address: Address, doing: str, timeout: float) -> Iterator[SyncClient]:
    """Connect a client for the block; raise errors of the node with `doing` in front."""
    with node_errors(doing), connect_to(address, name="spark", timeout=timeout) as client:
        yield client


def read(
    client: SyncClient,
    range_: Range,
    *,
    missing: Literal["error", "skip"],
    rows: int,
    timeout: float,
) -> Generator[list[Span]]:
    """Yield all messages of a range, in lists of about `rows` messages."""
    feed = _Feed(client, range_, missing == "skip", rows, timeout)
    if range_.first >= range_.end:
        return
    coming = asyncio.run_coroutine_threadsafe(feed.take(), client.loop)
    try:
        while spans := coming.result():
            coming = asyncio.run_coroutine_threadsafe(feed.take(), client.loop)
            yield spans
    finally:
        coming.cancel()
        with contextlib.suppress(StreamsError):  # the client may be gone
            client.wait(feed.close())


class _Feed:
    """Reads a range, in the thread of the client."""

    def __init__(
        self, client: SyncClient, range_: Range, skip: bool, rows: int, timeout: float
    ) -> None:
        self._client = client.client
        self._range = range_
        self._at = range_.first
        self._skip = skip
        self._rows = rows
        self._timeout = timeout
        self._subscription: Subscription | None = None

    async def take(self) -> list[Span]:
        """Return the next messages; an empty list at the end of the range."""
        spans: list[Span] = []
        count = size = 0
        while self._at < self._range.end and count < self._rows and size < LIST_BYTES:
            if self._subscription is None and not await self._subscribe():
                break
            assert self._subscription is not None
            try:
                records = await self._subscription.records(self._timeout)
            except StreamsError as error:
                if error.code != "OFFSET_OUT_OF_RANGE":
                    raise
                # There was a reconnect, and the next messages were deleted meanwhile
                await self.close()
                continue
            span = self._cut(records)
            if span is not None:
                spans.append(span)
                count += len(span)
                size += records.head.size
        return spans

    def _cut(self, records: Records) -> Span | None:
        """Return the messages of a batch that are in the range; None if there are none."""
        end = self._range.end
        if records.base > self._at:
            self._missed(min(records.base, end))
        low = max(self._at, records.base) - records.base
        high = min(end, records.end) - records.base
        self._at = max(self._at, records.end)
        return Span(records, low, high) if low < high else None

    async def _subscribe(self) -> bool:
        """Subscribe from the current position on; return False if no messages are left in the range."""
        min_messages, max_messages = PREFETCH_MESSAGES
        prefetch = min(
            max(READ_AHEAD_BYTES // max(self._range.size, 1), min_messages), max_messages
        )
        deadline = time.monotonic() + max(OUTAGE_S, self._timeout)
        while self._at < self._range.end:
            status = await self._client.describe(self._range.stream)
            if status["end"] < self._range.end:
                same_stream = self._range.identity and self._range.identity == status.get(
                    "identity"
                )
                if same_stream and time.monotonic() < deadline:
                    await asyncio.sleep(0.1)  # a new master does not know yet all that was stored
                    continue
                raise StreamSourceError(
                    f"{self._range}: the stream ends at {status['end']}. It was deleted and made anew since"
                )
            self._missed(min(status["first"], self._range.end))
            if self._at < self._range.end and await self._begin_subscription(prefetch):
                return True
        return False

    async def _begin_subscription(self, prefetch: int) -> bool:
        """Subscribe at the current position; return False if messages there were deleted just now."""
        try:
            self._subscription = await self._client.subscribe(
                self._range.stream, start=self._at, prefetch=prefetch, identity=self._range.identity
            )
        except StreamsError as error:
            if error.code != "OFFSET_OUT_OF_RANGE":
                raise
            return False
        return True

    def _missed(self, to: int) -> None:
        """Skip the deleted messages before offset `to`, or raise `MissingMessagesError`."""
        if not self._skip and to > self._at:
            raise MissingMessagesError(
                f"{self._range}: messages {self._at} to {to - 1} were deleted before they were read. Let the stream "
                "keep more (max_age, max_bytes), or go on without them: option missing = 'skip'"
            )
        self._at = max(self._at, to)

    async def close(self) -> None:
        """Close the subscription, if there is one; `take` would open another."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(StreamsError):
                await subscription.close()
