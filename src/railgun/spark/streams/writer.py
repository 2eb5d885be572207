"""Write to streams with Spark: the work of the tasks and of the driver. The rules are in `commit`.

With `delivery = "at-least-once"` nothing is staged: tasks publish at once, and what Spark repeats appears again.
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
from railgun.spark.streams.errors import BadOptionError, StreamSourceError, node_errors
from railgun.spark.streams.options import Options
from railgun.spark.streams.staging import OrderedPublisher, TaskReport, pieces


class _Writing:
    """The common part of batch and micro-batch writers."""

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
        """Connect to the node; if it is not at its address any more, look up its address here."""
        timeout = self.options.timeout
        try:
            return connect_to(self.address, name="spark", timeout=timeout)
        except NoNodeError:
            address = self.options.address()
            if address == self.address:
                raise
            return connect_to(address, name="spark", timeout=timeout)

    def target(self, client: SyncClient, *place: Any) -> Target:
        """Return the stream, and the writer in it: the query, its run, and the number of the micro-batch."""
        return Target(client, self.options.stream, self.options.timeout, *place)

    def node_errors(self) -> Any:
        """Raise errors of the node with the stream in front."""
        return node_errors(str(self.options))

    def _write(
        self, batches: Iterator[Any], query: str, run: str | None, label: int | None
    ) -> TaskReport:
        """Do the work of one task: stage or publish the rows; return its report."""
        context = TaskContext.get()
        assert context is not None
        partition, payloads = context.partitionId(), pieces(map(self.encoder.payloads, batches))
        with self.node_errors():
            if self.options.delivery == "at-least-once":
                self._publish(payloads)
                return TaskReport(query, run, partition)
            first = next(payloads, None)
            if first is None:
                return TaskReport(query, run, partition)
            with self.client() as client:
                target = self.target(client, query, run, label)
                report = target.stage(partition, itertools.chain([first], payloads))
        # Consume what is not staged as well: it updates the states of the query.
        deque(batches, maxlen=0)
        return report

    def _publish(self, payloads: Iterator[list[bytes]]) -> None:
        with self.client() as client:
            client.ensure(self.options.stream)
            publisher = OrderedPublisher(client, self.options.stream)
            attempt = uuid.uuid4().hex
            for number, piece in enumerate(payloads):
                publisher.add(piece, f"{attempt}/{number}")
            publisher.wait()


def _reports(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport]:
    """Return the reports of tasks in the order of their partitions; failed tasks have none."""
    reports = [report for report in messages if isinstance(report, TaskReport)]
    return sorted(reports, key=lambda report: report.partition)


class BatchWriter(_Writing, DataSourceArrowWriter):
    """A write that Spark does once; with the options `query` and `batch`, a micro-batch that may be repeated."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        if (options.query is None) != (options.batch is None):
            raise BadOptionError(
                f"{options}: the options query and batch go together: what is written with a name and a number is "
                "written once. In foreachBatch use a name of yours, and its batch_id"
            )
        once = uuid.uuid4().hex
        self.numbered = options.query is not None
        self.place = (options.query, None, options.batch) if self.numbered else (once, once, None)
        with self.node_errors(), self.client() as client:
            if options.delivery == "exactly-once":
                self.target(client, *self.place).ensure()

    def write(self, iterator: Iterator[Any]) -> TaskReport:
        """Write the rows of one task. Runs in the task."""
        return self._write(iterator, *self.place)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish what the tasks have staged, when all tasks are done."""
        if self.options.delivery == "at-least-once":
            return
        with self.node_errors(), self.client() as client:
            target = self.target(client, *self.place)
            target.commit(_reports(messages))
            if not self.numbered:
                target.forget()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop what the tasks have staged, when a task or the commit has failed for good."""
        if self.options.delivery == "at-least-once":
            return
        with self.node_errors(), self.client() as client:
            target = self.target(client, *self.place)
            if self.numbered:
                target.drop(_reports(messages))
            else:
                target.give_up()  # killed tasks have no report


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """Writes micro-batches. Spark makes a new instance for each commit: all state is in the reports or on the node."""

    def write(self, iterator: Iterator[Any]) -> TaskReport:
        """Write the rows of one task. Runs in the task."""
        context = TaskContext.get()
        assert context is not None
        query = self.options.query or context.getLocalProperty("sql.streaming.queryId")
        run = context.getLocalProperty("spark.jobGroup.id")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if not query or not run or batch is None:
            raise StreamSourceError(
                f"{self.options}: Spark does not say which query this task is of"
            )
        return self._write(iterator, query, run, int(batch))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish what the tasks have staged, when all tasks are done."""
        reports = _reports(messages)
        if reports and self.options.delivery == "exactly-once":
            with self.node_errors(), self.client() as client:
                self._target(client, reports, batchId).commit(reports)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Drop what the tasks have staged, when a task or the commit has failed for good."""
        reports = _reports(messages)
        if reports and self.options.delivery == "exactly-once":
            with self.node_errors(), self.client() as client:
                self._target(client, reports, batchId).drop(reports)

    def _target(self, client: SyncClient, reports: Sequence[TaskReport], batch: int) -> Target:
        return self.target(client, reports[0].query, reports[0].run, batch)
