"""Read streams with Spark: a fixed range of offsets, or micro-batches.

Rules:

1. What is read is decided when Spark plans: a range of offsets, cut into parts with about the same number of messages.
   The parts carry the node's address, so that executors need not look for it.
2. The position of a query is in Spark's checkpoint: `{"orders": 123, "#identity": "…"}`, the offset of the next message
   and the identity of the stream. A stream that was deleted and made anew is refused. Older checkpoints have no
   identity, and are accepted as they are. The node keeps no position, and the same offsets are the same messages
   whenever they are read.
3. A micro-batch takes what there is, at most `maxMessages`; with the trigger *available now*, what there was when the
   query began.
4. Once a query has reached its node, it waits for an outage that may pass (`transport.error_codes`), for `OUTAGE_S`
   seconds or for the option `timeout`, whichever is longer.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from railgun.client.address import Address
from railgun.client.errors import StreamsError, refuse_damaged
from railgun.client.retries import call_with_retries
from railgun.client.sync import SyncClient, connect_to
from railgun.spark.streams.decode import Decoder, FromArrow, FromBytes
from railgun.spark.streams.errors import (
    BadOptionError,
    MissingMessagesError,
    StreamSourceError,
    node_errors,
)
from railgun.spark.streams.feed import OUTAGE_S, Range, connected, read
from railgun.spark.streams.from_json import FromJson
from railgun.spark.streams.options import At, Options

IDENTITY: Final = "#identity"  # cannot be the name of a stream
Offset = dict[str, Any]
DECODERS: Final[dict[str, type[Decoder]]] = {
    "bytes": FromBytes,
    "json": FromJson,
    "arrow": FromArrow,
}


class RangePartition(InputPartition):
    """The range that one task reads."""

    def __init__(self, address: Address, range_: Range) -> None:
        self.address = address
        self.range = range_


class _Reading:
    """The common part of batch and micro-batch readers."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.decoder = DECODERS[options.format](options.stream, schema)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of a part as Arrow batches. Runs in a task."""
        assert isinstance(partition, RangePartition)
        range_, options = partition.range, self.options
        if range_.first >= range_.end:
            return
        with connected(partition.address, str(range_), options.timeout) as client:
            spans_of_range = read(
                client,
                range_,
                missing=options.missing,
                rows=options.batch_rows,
                timeout=options.timeout,
            )
            # Close it before the client is closed, whatever happens
            with contextlib.closing(spans_of_range):
                for spans in spans_of_range:
                    yield from self.decoder.rows(spans)

    def parts(
        self, address: Address, first: int, end: int, status: dict[str, Any]
    ) -> list[RangePartition]:
        """Cut a range into parts."""
        options = self.options
        size = status["bytes"] // max(status["end"] - status["first"], 1)
        count = options.partitions
        if count is None:
            count = min(os.cpu_count() or 1, -(-(end - first) // options.batch_rows))
        ranges = cut(first, end, max(count, 1))
        identity = str(status.get("identity", ""))
        return [
            RangePartition(address, Range(options.stream, *part, size, identity)) for part in ranges
        ]


def cut(first: int, end: int, count: int) -> list[tuple[int, int]]:
    """Cut a range into ranges of about the same size, none of them empty, but always into one at least.

    >>> cut(10, 20, 3)
    [(10, 13), (13, 16), (16, 20)]
    >>> cut(5, 6, 4), cut(7, 7, 4)
    ([(5, 6)], [(7, 7)])
    """
    count = max(min(count, end - first), 1)
    ends = [first + (end - first) * n // count for n in range(count + 1)]
    return list(itertools.pairwise(ends))


def described(client: SyncClient, options: Options) -> dict[str, Any]:
    """Return the node's status of the stream; raise `StreamSourceError` if the stream does not store messages."""
    status: dict[str, Any] = client.admin("describe", name=options.stream)
    if status["settings"]["kind"] != "persistent":
        raise StreamSourceError(
            f"{options}: the stream is ephemeral and stores nothing that Spark could read. Use a persistent stream"
        )
    return status


def place(options: Options, name: str, at: At, status: dict[str, Any]) -> int:
    """Return the offset that an option stands for."""
    if isinstance(at, str):
        return int(status["first"] if at == "start" else status["end"])
    if at > status["end"]:
        raise BadOptionError(
            f"{options}: option {name} is {at}, and the stream has {status['first']} to {status['end']}"
        )
    return at


class BatchReader(_Reading, DataSourceReader):
    """Reads a fixed range of a stream."""

    def partitions(self) -> Sequence[InputPartition]:
        """Decide what is read, and cut it into parts."""
        options = self.options
        address = options.address()
        with connected(address, str(options), options.timeout) as client:
            status = described(client, options)
            if options.end == "end":
                refuse_damaged(status)
        first = place(options, "start", options.start, status)
        end = place(options, "end", options.end, status)
        if first > end:
            raise BadOptionError(f"{options}: option start is {first}, behind end, which is {end}")
        first = first_present(options, first, end, status)
        return self.parts(address, first, end, status)


def first_present(options: Options, first: int, end: int, status: dict[str, Any]) -> int:
    """Return the first offset that is still stored; raise `MissingMessagesError` unless gaps are allowed."""
    if first >= status["first"] or first == end:
        return first
    if options.missing == "error":
        raise MissingMessagesError(
            f"{options}: messages {first} to {status['first'] - 1} were deleted. Let the stream keep more (max_age, "
            "max_bytes), or go on without them: option missing = 'skip'"
        )
    return min(int(status["first"]), end)


class MicroBatchReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream in micro-batches. The driver keeps one instance for the whole query."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        if options.end != "end":
            raise BadOptionError(
                f"{options}: a query has no end, but option end is {options.end}; read it with spark.read"
            )
        self._client: SyncClient | None = None
        self._address: Address | None = None
        self._was_connected = False
        self._last: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    # ------------------------------------------------------------ offsets

    def initialOffset(self) -> Offset:  # noqa: N802
        """Return the offset at which a new query begins."""
        status = self._status()
        return self._offset(place(self.options, "start", self.options.start, status), status)

    def _offset(self, at: int, status: dict[str, Any]) -> Offset:
        """Return a position as Spark keeps it: with the identity of the stream, if the node knows it."""
        identity = {IDENTITY: status["identity"]} if status.get("identity") else {}
        return {self.options.stream: at, **identity}

    def _same(self, offset: Offset, status: dict[str, Any]) -> bool:
        """Return whether a position is known to be one of this stream; raise if it is another's."""
        stored, current = offset.get(IDENTITY), status.get("identity")
        if stored and current and stored != current:
            raise StreamSourceError(
                f"{self.options}: the stream was deleted and made anew since the query has read it. Begin with a new "
                "checkpoint (STREAM_REPLACED)"
            )
        return bool(stored and current)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the offset at which the next micro-batch ends."""
        at, status = self._at(start), self._status()
        if not self._same(start, status) and at > status["end"]:
            raise StreamSourceError(
                f"{self.options}: the query has read up to {at}, but the stream ends at {status['end']}. It was "
                "deleted and made anew: begin with a new checkpoint"
            )
        if at >= status["end"]:  # everything that can be read has been read
            with node_errors(str(self.options)):
                refuse_damaged(status)
        end = status["end"] if self._last is None else min(status["end"], self._last)
        if isinstance(limit, ReadMaxRows):
            # Deleted messages do not count, or a micro-batch could be empty.
            end = min(end, max(at, status["first"]) + limit.max_rows)
        return self._offset(max(at, end), status)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return how many messages a micro-batch takes."""
        max_rows = self.options.max_messages
        return ReadAllAvailable() if max_rows is None else ReadMaxRows(max_rows)

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Return the end of the stream, for monitoring."""
        status = self._status()
        return self._offset(status["end"], status)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read nothing that comes later than now."""
        self._last = self._status()["end"]

    def _at(self, offset: Offset) -> int:
        if self.options.stream not in offset:
            others = ", ".join(name for name in offset if name != IDENTITY)
            raise StreamSourceError(
                f"{self.options}: the checkpoint is of {others}. A query goes on with the stream it began "
                "with: give it a checkpoint of its own"
            )
        return int(offset[self.options.stream])

    # ------------------------------------------------------------ work

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the parts of a micro-batch."""
        first, last = self._at(start), self._at(end)
        if first >= last:
            return []
        status = self._status()
        assert self._address is not None
        if not self._same(end, status) and last > status["end"]:
            raise StreamSourceError(
                f"{self.options}: the checkpoint says that there are messages up to {last}, but the stream ends at "
                f"{status['end']}. It was deleted and made anew: begin with a new checkpoint"
            )
        first = first_present(self.options, first, last, status)
        return self.parts(self._address, first, last, status)

    def stop(self) -> None:
        """Close the connection: the query has ended."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _status(self) -> dict[str, Any]:
        """Return the node's status of the stream, over a connection that is kept."""
        with node_errors(str(self.options)):
            return call_with_retries(
                self._ask,
                give_up=lambda: not self._was_connected,
                timeout_s=max(OUTAGE_S, self.options.timeout),
            )

    def _ask(self) -> dict[str, Any]:
        if self._client is None:
            self._address = self.options.address()
            self._client = connect_to(self._address, name="spark", timeout=self.options.timeout)
            self._was_connected = True
        try:
            return described(self._client, self.options)
        except StreamsError as error:
            if error.may_pass:
                self.stop()  # the node may be elsewhere now
            raise
