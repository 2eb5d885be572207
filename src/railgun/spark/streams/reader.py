"""Reading streams from Spark: a fixed range of offsets, and micro-batches.

Rules:

1. What is read is decided when Spark plans: offsets from here to there, in parts of about the same number of messages.
   The parts carry the node's address, so that executors look for nothing.
2. The position of a query is Spark's, in its checkpoint: `{"orders": 123, "#identity": "…"}`, the offset of the next
   message and the identity of the stream: one that was deleted and made anew is refused. Older checkpoints have no
   identity, and are taken as they are. The node
   keeps nothing of it, and the same offsets are the same messages whenever they are read.
3. A micro-batch takes what there is, at most `maxMessages`; with the trigger *available now*, what there was when
   the query began.
4. Once a query has reached its node, an outage that may pass (`transport.error_codes`) is waited for, `OUTAGE_S`
   seconds or longer if the option `timeout` is.
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
from railgun.spark.streams.decode import Decoder, FromArrow, Plain
from railgun.spark.streams.errors import (
    BadOptionError,
    MissingMessagesError,
    StreamSourceError,
    named,
)
from railgun.spark.streams.feed import OUTAGE_S, Range, connected, read
from railgun.spark.streams.from_json import FromJson
from railgun.spark.streams.options import At, Options

IDENTITY: Final = "#identity"  # no name of a stream
Offset = dict[str, Any]
DECODERS: Final[dict[str, type[Decoder]]] = {"bytes": Plain, "json": FromJson, "arrow": FromArrow}


class Part(InputPartition):
    """What one task reads."""

    def __init__(self, address: Address, asked: Range) -> None:
        self.address = address
        self.asked = asked


class _Reading:
    """What both ways of reading have in common."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.decoder = DECODERS[options.format](options.stream, schema)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of a part, as Arrow batches. Runs in a task."""
        assert isinstance(partition, Part)
        asked, options = partition.asked, self.options
        if asked.first >= asked.end:
            return
        with connected(partition.address, str(asked), options.timeout) as client:
            found = read(
                client,
                asked,
                missing=options.missing,
                rows=options.batch_rows,
                timeout=options.timeout,
            )
            with contextlib.closing(found):  # before the client is, whatever happens
                for spans in found:
                    yield from self.decoder.rows(spans)

    def parts(self, address: Address, first: int, end: int, told: dict[str, Any]) -> list[Part]:
        """A range, cut into parts."""
        options = self.options
        size = told["bytes"] // max(told["end"] - told["first"], 1)
        count = options.partitions
        if count is None:
            count = min(os.cpu_count() or 1, -(-(end - first) // options.batch_rows))
        ranges = cut(first, end, max(count, 1))
        identity = str(told.get("identity", ""))
        return [Part(address, Range(options.stream, *one, size, identity)) for one in ranges]


def cut(first: int, end: int, count: int) -> list[tuple[int, int]]:
    """Ranges that are about the same size, none of them empty; but one at least.

    >>> cut(10, 20, 3)
    [(10, 13), (13, 16), (16, 20)]
    >>> cut(5, 6, 4), cut(7, 7, 4)
    ([(5, 6)], [(7, 7)])
    """
    count = max(min(count, end - first), 1)
    ends = [first + (end - first) * n // count for n in range(count + 1)]
    return list(itertools.pairwise(ends))


def described(client: SyncClient, options: Options) -> dict[str, Any]:
    """What the node says of the stream, which has to keep its messages."""
    told: dict[str, Any] = client.admin("describe", name=options.stream)
    if told["settings"]["kind"] != "persistent":
        raise StreamSourceError(
            f"{options}: it is ephemeral and keeps nothing that Spark could read. Make a persistent one"
        )
    return told


def place(options: Options, name: str, at: At, told: dict[str, Any]) -> int:
    """The offset that is meant by an option."""
    if isinstance(at, str):
        return int(told["first"] if at == "start" else told["end"])
    if at > told["end"]:
        raise BadOptionError(
            f"{options}: option {name} is {at}, and the stream has {told['first']} to {told['end']}"
        )
    return at


class BatchReader(_Reading, DataSourceReader):
    """A fixed range of a stream."""

    def partitions(self) -> Sequence[InputPartition]:
        """Decide what is read, and how it is shared out."""
        options = self.options
        address = options.address()
        with connected(address, str(options), options.timeout) as client:
            told = described(client, options)
            if options.end == "end":
                refuse_damaged(told)
        first = place(options, "start", options.start, told)
        end = place(options, "end", options.end, told)
        if first > end:
            raise BadOptionError(f"{options}: option start is {first}, behind end, which is {end}")
        first = present(options, first, end, told)
        return self.parts(address, first, end, told)


def present(options: Options, first: int, end: int, told: dict[str, Any]) -> int:
    """From where on messages are there; those before may be missing."""
    if first >= told["first"] or first == end:
        return first
    if options.missing == "error":
        raise MissingMessagesError(
            f"{options}: messages {first} to {told['first'] - 1} were deleted. Let the stream keep more (max_age, "
            "max_bytes), or go on without them: option missing = 'skip'"
        )
    return min(int(told["first"]), end)


class MicroBatchReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream, by micro-batches. One is with the driver for the life of a query."""

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
        """Where a new query begins."""
        told = self._told()
        return self._offset(place(self.options, "start", self.options.start, told), told)

    def _offset(self, at: int, told: dict[str, Any]) -> Offset:
        """Return a position as Spark keeps it: with the identity of the stream, if the node knows it."""
        identity = {IDENTITY: told["identity"]} if told.get("identity") else {}
        return {self.options.stream: at, **identity}

    def _same(self, offset: Offset, told: dict[str, Any]) -> bool:
        """Return whether a position is known to be one of this stream; raise if it is another's."""
        was, now = offset.get(IDENTITY), told.get("identity")
        if was and now and was != now:
            raise StreamSourceError(
                f"{self.options}: the stream was deleted and made anew since the query has read it. Begin with a new "
                "checkpoint (STREAM_REPLACED)"
            )
        return bool(was and now)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Where the next micro-batch ends."""
        at, told = self._at(start), self._told()
        if not self._same(start, told) and at > told["end"]:
            raise StreamSourceError(
                f"{self.options}: the query has read up to {at}, but the stream ends at {told['end']}. It was deleted "
                "and made anew: begin with a new checkpoint"
            )
        if at >= told["end"]:  # all that can be read was read
            with named(str(self.options)):
                refuse_damaged(told)
        end = told["end"] if self._last is None else min(told["end"], self._last)
        if isinstance(limit, ReadMaxRows):
            # Those that are gone do not count, or a micro-batch could be of nothing.
            end = min(end, max(at, told["first"]) + limit.max_rows)
        return self._offset(max(at, end), told)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """How much a micro-batch takes."""
        most = self.options.max_messages
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """Where the stream ends, for those who watch the query."""
        told = self._told()
        return self._offset(told["end"], told)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Nothing that comes later is read."""
        self._last = self._told()["end"]

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
        """How a micro-batch is shared out."""
        first, last = self._at(start), self._at(end)
        if first >= last:
            return []
        told = self._told()
        assert self._address is not None
        if not self._same(end, told) and last > told["end"]:
            raise StreamSourceError(
                f"{self.options}: the checkpoint says that there are messages up to {last}, but the stream ends at "
                f"{told['end']}. It was deleted and made anew: begin with a new checkpoint"
            )
        first = present(self.options, first, last, told)
        return self.parts(self._address, first, last, told)

    def stop(self) -> None:
        """The query has ended."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _told(self) -> dict[str, Any]:
        """What the node says of the stream, by a connection that is kept."""
        with named(str(self.options)):
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
                self.stop()  # perhaps the node is elsewhere now
            raise
