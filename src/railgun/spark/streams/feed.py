"""A range of a stream on its way from the node to a task, in batches as they lie on the node's disk.

Rules:

1. A range is read by a subscription without a group: nothing is acked, and nobody's position moves.
2. While one list of batches is worked on, the next one comes; what is read ahead stays within bounds of bytes.
3. Messages that were deleted before they were read are an error, or passed over if that was asked for (`missing`).
4. A node that goes away is waited for, as long as one call may take (`timeout`).
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
from railgun.spark.streams.errors import MissingMessagesError, StreamSourceError, named
from railgun.transport.records import Records

if TYPE_CHECKING:
    from railgun.client.subscription import Subscription

AHEAD: Final = 24 << 20  # bytes that may be under way
ENOUGH: Final = 32 << 20  # bytes of a list
OUTAGE_S: Final = (
    120.0  # seconds for which a query waits at least until an outage of its nodes has passed
)
PREFETCH: Final = (200, 200_000)  # messages under way: at least, and at most


class Span(NamedTuple):
    """Rows of a batch."""

    records: Records
    low: int
    high: int

    @property
    def first(self) -> int:
        """The offset of the first one."""
        return self.records.base + self.low

    def __len__(self) -> int:
        return self.high - self.low


class Range(NamedTuple):
    """What to read: offsets of a stream, the first one in, the last one out."""

    stream: str
    first: int
    end: int
    size: int = 0
    """About how many bytes a message has."""
    identity: str = ""
    """Of the stream: one that was deleted and made anew has another. Empty: not known."""

    def __str__(self) -> str:
        return f"railgun, stream {self.stream!r}, offsets {self.first} to {self.end}"


@contextlib.contextmanager
def connected(address: Address, what: str, timeout: float) -> Iterator[SyncClient]:
    """A client within this; what the node refuses is told with `what`."""
    with named(what), connect_to(address, name="spark", timeout=timeout) as client:
        yield client


def read(
    client: SyncClient,
    asked: Range,
    *,
    missing: Literal["error", "skip"],
    rows: int,
    timeout: float,
) -> Generator[list[Span]]:
    """All messages of a range, in lists of about so many."""
    feed = _Feed(client, asked, missing == "skip", rows, timeout)
    if asked.first >= asked.end:
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
        self, client: SyncClient, asked: Range, skip: bool, rows: int, timeout: float
    ) -> None:
        self._client = client.client
        self._asked = asked
        self._at = asked.first
        self._skip = skip
        self._rows = rows
        self._timeout = timeout
        self._subscription: Subscription | None = None

    async def take(self) -> list[Span]:
        """The next messages; none: that was all."""
        found: list[Span] = []
        count = size = 0
        while self._at < self._asked.end and count < self._rows and size < ENOUGH:
            if self._subscription is None and not await self._subscribe():
                break
            assert self._subscription is not None
            try:
                records = await self._subscription.records(self._timeout)
            except StreamsError as error:
                if error.code != "OFFSET_OUT_OF_RANGE":
                    raise
                await self.close()  # a new connection, and what comes next is gone
                continue
            span = self._cut(records)
            if span is not None:
                found.append(span)
                count += len(span)
                size += records.head.size
        return found

    def _cut(self, records: Records) -> Span | None:
        """What is in the range of a batch that has come."""
        end = self._asked.end
        if records.base > self._at:
            self._missed(min(records.base, end))
        low = max(self._at, records.base) - records.base
        high = min(end, records.end) - records.base
        self._at = max(self._at, records.end)
        return Span(records, low, high) if low < high else None

    async def _subscribe(self) -> bool:
        """From where it stands; False: nothing is left there."""
        least, most = PREFETCH
        prefetch = min(max(AHEAD // max(self._asked.size, 1), least), most)
        deadline = time.monotonic() + max(OUTAGE_S, self._timeout)
        while self._at < self._asked.end:
            told = await self._client.describe(self._asked.stream)
            if told["end"] < self._asked.end:
                same = self._asked.identity and self._asked.identity == told.get("identity")
                if same and time.monotonic() < deadline:
                    await asyncio.sleep(0.1)  # a new master is not sure yet of what was there
                    continue
                raise StreamSourceError(
                    f"{self._asked}: the stream ends at {told['end']}. It was deleted and made anew since"
                )
            self._missed(min(told["first"], self._asked.end))
            if self._at < self._asked.end and await self._begun(prefetch):
                return True
        return False

    async def _begun(self, prefetch: int) -> bool:
        """Whether it begins there; if not, more was deleted just now."""
        try:
            self._subscription = await self._client.subscribe(
                self._asked.stream, start=self._at, prefetch=prefetch, identity=self._asked.identity
            )
        except StreamsError as error:
            if error.code != "OFFSET_OUT_OF_RANGE":
                raise
            return False
        return True

    def _missed(self, to: int) -> None:
        """Those before are gone."""
        if not self._skip and to > self._at:
            raise MissingMessagesError(
                f"{self._asked}: messages {self._at} to {to - 1} were deleted before they were read. Let the stream "
                "keep more (max_age, max_bytes), or go on without them: option missing = 'skip'"
            )
        self._at = max(self._at, to)

    async def close(self) -> None:
        """No more."""
        made, self._subscription = self._subscription, None
        if made is not None:
            with contextlib.suppress(StreamsError):
                await made.close()
