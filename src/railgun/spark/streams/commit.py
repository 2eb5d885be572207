"""Publish what Spark's tasks have written to a stream exactly once, whatever Spark repeats.

Spark repeats a micro-batch that it does not know to be committed: after a failure, or after a restart days later. The
repeated tasks may divide and order the rows differently. Rules:

1. A query is a *producer* of its stream (`client.producer`), under a name that it keeps over its restarts. Tasks stage
   what they write, each attempt under a sequence of its own. One commit on the driver makes the sequences of the tasks
   that Spark has accepted part of the stream, in the order of the partitions: all at once, or not at all.
2. The number of the micro-batch is the *label* of the commit. A micro-batch whose label was committed is done, whenever
   it is repeated, and whatever it has now: nothing of the repetition is staged, or it is dropped. What other attempts
   have staged for the label is dropped with its commit. An empty micro-batch commits its label alone.
3. Each run of a query is a *session*: once its first task has begun, earlier runs can neither stage nor commit any
   more, and what they have staged is dropped.
4. A write with the options `query` and `batch` joins the current epoch of that query's producer: several such writes at
   a time do not disturb each other. Only its label keeps it from being published twice.
5. Any other write is committed once or never, by Spark's rules. It is a producer of its own, which is forgotten after
   its commit. If it fails, a new session of that producer fences its tasks and drops what they have staged.
6. What was staged for a stream that has been deleted and made anew since is lost; that is an error, never silent.
7. Whatever is left behind in spite of this is dropped later (`QUERY_LIFETIME_S`, `WRITE_LIFETIME_S`).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from railgun.client.errors import StreamsError
from railgun.client.retrying_client import RetryingClient, StagedPieces, producer_name
from railgun.client.sync import SyncClient
from railgun.spark.streams.errors import InDoubtError, StreamSourceError
from railgun.spark.streams.feed import OUTAGE_S
from railgun.spark.streams.older import take_over
from railgun.spark.streams.staging import TaskReport

if TYPE_CHECKING:
    from railgun.client.producer import Producer

QUERY_LIFETIME_S: Final = 7 * 86_400.0
"""How long a node keeps what a query has staged and not committed."""
WRITE_LIFETIME_S: Final = 86_400.0
"""How long a node remembers a write that is not a micro-batch, after its last use."""


class Target:
    """The stream that a run of a query writes to.

    `run`: the session; None for a write that the user has numbered. `label`: the number of the micro-batch; None for a
    write that is not a micro-batch.
    """

    def __init__(
        self,
        client: SyncClient,
        stream: str,
        timeout: float,
        query: str,
        run: str | None = None,
        label: int | None = None,
    ) -> None:
        self.stream = stream
        self.query = query
        self.run = run
        self.label = label
        self.subject = f"railgun, stream {stream!r}"
        self._name = producer_name(f"spark/{query}")
        self._node = RetryingClient(client, self.subject, max(OUTAGE_S, timeout))

    def ensure(self) -> None:
        """Create the stream if it does not exist; raise `StreamSourceError` if it cannot have exactly-once writes."""
        self._node.ensure(self.stream)
        if self._node.admin("describe", name=self.stream)["settings"]["kind"] != "persistent":
            raise StreamSourceError(
                f"{self.subject}: the stream is ephemeral and stores nothing, so writes cannot be exactly once. Choose "
                "a persistent stream, or option delivery = 'at-least-once'"
            )

    def begin(self) -> Producer:
        """Begin the session of this run, or join the producer's current epoch."""
        try:
            return self._begin()
        except StreamsError as error:
            if error.code not in ("NO_STREAM", "NOT_PERSISTENT"):
                raise
        self.ensure()
        return self._begin()

    def _begin(self) -> Producer:
        lifetime = WRITE_LIFETIME_S if self.label is None else QUERY_LIFETIME_S
        if self.run is not None:
            return self._node.begin(self.stream, self._name, session=self.run, lifetime=lifetime)
        producers = self._node.admin("producers", name=self.stream)
        epoch = max(
            (entry["epoch"] for entry in producers if entry["name"] == self._name), default=0
        )
        return self._node.begin(self.stream, self._name, epoch, lifetime=lifetime)

    def stage(self, partition: int, pieces: Iterable[list[bytes]]) -> TaskReport:
        """Stage the payloads of a task, piece by piece; return the task's report."""
        report = TaskReport(self.query, self.run, partition)
        with self._explained():
            self._stage(report, pieces)
        return report

    def _stage(self, report: TaskReport, pieces: Iterable[list[bytes]]) -> None:
        staged: StagedPieces | None = None
        try:
            for piece in pieces:
                if staged is None:
                    producer = self.begin()
                    report.epoch, report.identity = producer.epoch, producer.identity
                    staged = StagedPieces(self._node, self._node.open_stage(producer, self.label))
                staged.add(piece)
            if staged is not None:
                staged.wait()
                report.sequence, report.count = staged.stage.sequence, staged.count
        except StreamsError as error:
            if error.code != "SEQUENCE_OVER" or self.label is None:
                raise
            report.done = True

    def commit(self, written: Sequence[TaskReport]) -> int:
        """Make what was staged part of the stream; return the number of messages added."""
        with self._explained():
            return self._commit(written)

    def _commit(self, written: Sequence[TaskReport]) -> int:
        counts = {
            report.sequence: report.count for report in written if report.sequence is not None
        }
        if not counts and self.label is None:
            return 0
        producer = self.begin()
        replaced = {report.identity for report in written if report.identity} - {producer.identity}
        if replaced and producer.identity:
            raise StreamSourceError(
                f"{self.subject}: the stream was deleted and made anew while it was written to, and what was staged is "
                "lost. Write it again: a query does so when it is started again"
            )
        if any(report.epoch != producer.epoch for report in written if report.sequence is not None):
            raise StreamsError("FENCED", f"epoch {producer.epoch} has begun")
        if self.label is None:
            return self._commit_once(producer, counts)
        take_over(self._node, producer, self.query, self.label, numbered=self.run is None)
        is_committed = any(first <= self.label <= last for first, last in producer.labels)
        if not is_committed and any(report.done for report in written):
            raise InDoubtError(
                f"{self.subject}: the node said that micro-batch {self.label} of query {self.query} was committed "
                "before, when it was to be staged, and does not know of it any more: its producer was forgotten. Look "
                "into the stream; then begin with a new checkpoint"
            )
        return self._node.commit(producer, counts, label=self.label)

    def _commit_once(self, producer: Producer, counts: dict[int, int]) -> int:
        try:
            return self._node.commit(producer, counts)
        except StreamsError as error:
            if not error.may_pass:
                raise
            raise InDoubtError(
                f"{self.subject}: whether this write was published is not known: {error}. Look into the stream before "
                "it is written again. With the options query and batch it could be repeated"
            ) from error

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise errors of a refused commit that say what to do."""
        try:
            yield
        except StreamsError as error:
            if error.code == "LABEL_FORGOTTEN":
                raise InDoubtError(
                    f"{self.subject}: whether micro-batch {self.label} of query {self.query} was published is not "
                    f"known any more: {error}. The checkpoint is an old one: begin with a new one, and with a new name "
                    "if there is the option query"
                ) from error
            if error.code == "FENCED":
                raise StreamSourceError(
                    f"{self.subject}: another run of query {self.query} has begun since, and this one is over: "
                    f"{error}. If two drivers run on one checkpoint, stop one of them; else write it again"
                ) from error
            raise

    def drop(self, written: Sequence[TaskReport]) -> None:
        """Drop what tasks of a micro-batch have staged, if the node can be reached now.

        The rest goes with the next run, with the commit of the label, or with time.
        """
        staged = [report for report in written if report.sequence is not None]
        if staged:
            place = {"name": self.stream, "producer": self._name, "epoch": staged[0].epoch}
            sequences = [report.sequence for report in staged]
            with contextlib.suppress(StreamsError):
                self._node.client.admin("drop_sequences", **place, sequences=sequences)

    def forget(self) -> None:
        """Forget the producer of a committed write, if the node can be reached now."""
        with contextlib.suppress(StreamsError):
            self._node.client.admin("forget_producer", name=self.stream, producer=self._name)

    def give_up(self) -> None:
        """Fence the tasks of a failed write, and drop what they have staged, if the node can be reached now."""
        session = {"session": uuid.uuid4().hex, "lifetime": WRITE_LIFETIME_S}
        with contextlib.suppress(StreamsError):
            self._node.client.admin(
                "begin_producer", name=self.stream, producer=self._name, **session
            )
