"""Writing to streams from Spark: the tasks' side, and who is asked to commit. The rules are in `commit`.

With `delivery = "at-least-once"` nothing is staged: tasks publish as they go, and what is repeated appears again.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from railgun.client.address import Address
from railgun.client.errors import NoNodeError
from railgun.client.sync import SyncClient, connect_to
from railgun.spark.streams.commit import Target
from railgun.spark.streams.encode import ENCODERS
from railgun.spark.streams.errors import BadOptionError, StreamSourceError, named
from railgun.spark.streams.options import Options
from railgun.spark.streams.staging import (
    LITTLE,
    Line,
    Written,
    once,
    pieces,
    size_of,
    stage,
    staged_name,
)


class _Writing:
    """What both ways of writing have in common."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise BadOptionError(
                f'{options}: messages are added to a stream, and those in it stay: mode("append"), INSERT INTO, or '
                'outputMode("append") or ("update"). To empty it: railgun stream purge'
            )
        self.options = options
        self.encoder = ENCODERS[options.format](options.stream, schema, options.rows_per_message)
        self.address: Address = options.address()

    def client(self) -> SyncClient:
        """A connection; to where the node is now, if that is to be seen here."""
        timeout = self.options.timeout
        try:
            return connect_to(self.address, name="spark", timeout=timeout)
        except NoNodeError:
            found = self.options.address()
            if found == self.address:
                raise
            return connect_to(found, name="spark", timeout=timeout)

    def target(self, client: SyncClient) -> Target:
        """The stream."""
        options = self.options
        one_by_one = options.batch is None  # else by numbers of the user's, in any order
        return Target(client, options.stream, options.timeout, sequential=one_by_one)

    def named(self) -> Any:
        """What the node refuses is told with the stream."""
        return named(str(self.options))

    def _write(self, batches: Iterator[Any], query: str, batch: int) -> Written:
        """The work of one task."""
        context = TaskContext.get()
        assert context is not None
        run = context.getLocalProperty("spark.jobGroup.id") or ""
        place = (query, batch, context.partitionId(), context.attemptNumber(), run)
        lists = map(self.encoder.payloads, batches)
        with self.named():
            if self.options.delivery == "at-least-once":
                self._publish(lists)
                return Written(*place, [], None)
            little, rest = _little(lists)
            if rest is None:
                return Written(*place, list(itertools.chain(*little)), None)
            with self.client() as client:
                name = staged_name(query, self.options.stream, batch)
                made = stage(client, name, itertools.chain(little, rest))
            return Written(*place, [], made)

    def _publish(self, lists: Iterable[list[bytes]]) -> None:
        with self.client() as client:
            client.ensure(self.options.stream)
            line = Line(client, self.options.stream)
            attempt = uuid.uuid4().hex
            for number, piece in enumerate(pieces(lists)):
                line.add(piece, f"{attempt}/{number}")
            line.wait()


def _little(
    lists: Iterator[list[bytes]],
) -> tuple[list[list[bytes]], Iterator[list[bytes]] | None]:
    """The first payloads; and the others, if it is more than a little."""
    found: list[list[bytes]] = []
    size = 0
    for some in lists:
        found.append(some)
        size += size_of(some)
        if size > LITTLE:
            return found, lists
    return found, None


def _reports(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    """What tasks report, in their order; those that failed report nothing."""
    found = [one for one in messages if isinstance(one, Written)]
    return sorted(found, key=lambda one: one.partition)


class BatchWriter(_Writing, DataSourceArrowWriter):
    """A write that is done once; with the options `query` and `batch`, a micro-batch that may be repeated."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        if (options.query is None) != (options.batch is None):
            raise BadOptionError(
                f"{options}: the options query and batch go together: what is written by such a name and number is "
                "written once. In foreachBatch they are a name of yours, and its batch_id"
            )
        self.query = options.query or once()
        with self.named(), self.client() as client:
            if options.delivery == "exactly-once":
                self.target(client).ensure()
                self.target(client).sweep_old()

    def write(self, iterator: Iterator[Any]) -> Written:
        """Runs in a task."""
        return self._write(iterator, self.query, self.options.batch or 0)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        if self.options.delivery == "at-least-once":
            return
        with self.named(), self.client() as client:
            if self.options.batch is None:
                self.target(client).commit(_reports(messages))
            else:
                reports = _reports(messages)
                self.target(client).commit_batch(self.query, self.options.batch, reports)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """A task has failed for good, or the commit."""
        with self.named(), self.client() as client:
            if self.options.batch is None:
                self.target(client).sweep(self.query)  # also of those that were killed
            else:
                reports = _reports(messages)
                self.target(client).abort_batch(self.query, self.options.batch, reports)


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Micro-batches. It is made anew for each commit: what has to be known is in the reports, and on the node."""

    def write(self, iterator: Iterator[Any]) -> Written:
        """Runs in a task."""
        context = TaskContext.get()
        assert context is not None
        query = self.options.query or context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if not query or batch is None:
            raise StreamSourceError(f"{self.options}: Spark does not say which query this is")
        return self._write(iterator, query, int(batch))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All tasks are done."""
        reports = _reports(messages)
        if reports and self.options.delivery == "exactly-once":
            with self.named(), self.client() as client:
                self.target(client).commit_batch(reports[0].query, batchId, reports)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """A task has failed for good, or the commit."""
        reports = _reports(messages)
        if reports:
            with self.named(), self.client() as client:
                self.target(client).abort_batch(reports[0].query, batchId, reports)
