"""Writing to streams from Spark: the tasks' side, and who is asked to commit. The rules are in `commit`.

With `delivery = "at-least-once"` nothing is staged: tasks publish as they go, and what is repeated appears again.
"""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
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
from railgun.spark.streams.staging import Line, Written, pieces


class _Writing:
    """What both ways of writing have in common."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise BadOptionError(
                f'{options}: messages are added to a stream, and those in it stay: mode("append"), INSERT INTO, or '
                'outputMode("append"). To empty it: railgun stream purge'
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

    def target(self, client: SyncClient, *place: Any) -> Target:
        """The stream, and who writes to it: the query, its run, and the number of the micro-batch."""
        return Target(client, self.options.stream, self.options.timeout, *place)

    def named(self) -> Any:
        """What the node refuses is told with the stream."""
        return named(str(self.options))

    def _write(
        self, batches: Iterator[Any], query: str, run: str | None, label: int | None
    ) -> Written:
        """Do the work of one task."""
        context = TaskContext.get()
        assert context is not None
        partition, found = context.partitionId(), pieces(map(self.encoder.payloads, batches))
        with self.named():
            if self.options.delivery == "at-least-once":
                self._publish(found)
                return Written(query, run, partition)
            first = next(found, None)
            if first is None:
                return Written(query, run, partition)
            with self.client() as client:
                target = self.target(client, query, run, label)
                report = target.stage(partition, itertools.chain([first], found))
        deque(
            batches, maxlen=0
        )  # what is not staged is made all the same: states of the query go with it
        return report

    def _publish(self, found: Iterator[list[bytes]]) -> None:
        with self.client() as client:
            client.ensure(self.options.stream)
            line = Line(client, self.options.stream)
            attempt = uuid.uuid4().hex
            for number, piece in enumerate(found):
                line.add(piece, f"{attempt}/{number}")
            line.wait()


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
        once = uuid.uuid4().hex
        self.numbered = options.query is not None
        self.place = (options.query, None, options.batch) if self.numbered else (once, once, None)
        with self.named(), self.client() as client:
            if options.delivery == "exactly-once":
                self.target(client, *self.place).ensure()

    def write(self, iterator: Iterator[Any]) -> Written:
        """Runs in a task."""
        return self._write(iterator, *self.place)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        if self.options.delivery == "at-least-once":
            return
        with self.named(), self.client() as client:
            target = self.target(client, *self.place)
            target.commit(_reports(messages))
            if not self.numbered:
                target.forget()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """A task has failed for good, or the commit."""
        if self.options.delivery == "at-least-once":
            return
        with self.named(), self.client() as client:
            target = self.target(client, *self.place)
            if self.numbered:
                target.drop(_reports(messages))
            else:
                target.give_up()  # also of those that were killed


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Micro-batches. It is made anew for each commit: what has to be known is in the reports, and on the node."""

    def write(self, iterator: Iterator[Any]) -> Written:
        """Runs in a task."""
        context = TaskContext.get()
        assert context is not None
        query = self.options.query or context.getLocalProperty("sql.streaming.queryId")
        run = context.getLocalProperty("spark.jobGroup.id")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if not query or not run or batch is None:
            raise StreamSourceError(f"{self.options}: Spark does not say which query this is")
        return self._write(iterator, query, run, int(batch))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All tasks are done."""
        reports = _reports(messages)
        if reports and self.options.delivery == "exactly-once":
            with self.named(), self.client() as client:
                self._target(client, reports, batchId).commit(reports)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """A task has failed for good, or the commit."""
        reports = _reports(messages)
        if reports and self.options.delivery == "exactly-once":
            with self.named(), self.client() as client:
                self._target(client, reports, batchId).drop(reports)

    def _target(self, client: SyncClient, reports: Sequence[Written], batch: int) -> Target:
        return self.target(client, reports[0].query, reports[0].run, batch)
