"""What tasks have written and nobody sees yet.

Rules:

1. A task that writes little brings it along with its report. One that writes much stages it in a stream of its own on
   the node, `_staged.…`, piece by piece, and reports when all of it is on the node's disk.
2. Each attempt of a task has a stream of its own. One that fails takes it away, if it still can: Spark may kill it.
   What is left behind is taken away when the write is aborted, or by a later commit of the query (see `commit`). What a
   killed task of a write that is no micro-batch makes even after that, by a later write, a day on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
import re
import time
import uuid
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, cast

from pyspark.sql.datasource import WriterCommitMessage

from railgun.client.errors import DuplicateIdError, StreamsError
from railgun.client.patience import patiently
from railgun.client.sync import SyncClient
from railgun.spark.streams.feed import OUTAGE_S
from railgun.wire.records import Column, Records

LITTLE: Final = 256 << 10  # bytes of a task that go along with its report
PIECE: Final = 256 << 10  # bytes published at once
UNDER_WAY: Final = 16  # pieces that are not on disk yet
PREFETCH: Final = 20_000
OLD: Final = 86_400.0  # seconds after which nobody works on a write any more
OVERHEAD: Final = 12  # bytes of a message besides its payload


class Written(WriterCommitMessage):
    """What a task reports."""

    def __init__(
        self,
        query: str,
        batch: int,
        partition: int,
        attempt: int,
        run: str,
        payloads: list[bytes],
        staged: tuple[str, int] | None,
    ) -> None:
        self.query = query
        """Whose micro-batch it is."""
        self.batch = batch
        self.partition = partition
        self.attempt = attempt
        self.run = run
        """Which start of the query, as Spark calls it."""
        self.payloads = payloads
        """All of it, if it is little."""
        self.staged = staged
        """Else the stream it is in, and how many messages that are."""


def once() -> str:
    """A name for a write that is no micro-batch; it says since when."""
    return f"once-{int(time.time())}-{uuid.uuid4().hex}"


def is_old(name: str) -> bool:
    """Whether a stream was staged by such a write, so long ago that it is over.

    >>> is_old(staged_name(once(), "orders", 0)), is_old(staged_name("my query", "orders", 0))
    (False, False)
    >>> is_old(f"_staged.once-1700000000-{'0' * 32}.0.1f")
    True
    """
    found = re.fullmatch(r"_staged\.once-([0-9]+)-[0-9a-f]{32}\.0\.[0-9a-f]+", name)
    return found is not None and int(found[1]) < time.time() - OLD


def staged_prefix(query: str, target: str) -> str:
    """How the names of streams begin in which a query stages what goes to a stream."""
    if re.fullmatch(r"once-[0-9]+-[0-9a-f]{32}", query):
        return f"_staged.{query}."
    return f"_staged.spark-{digest(query, target)}."


def staged_name(query: str, target: str, batch: int) -> str:
    """The name of a new one."""
    return f"{staged_prefix(query, target)}{batch}.{uuid.uuid4().hex}"


def digest(query: str, target: str) -> str:
    """A short name for a query and where it writes to."""
    return hashlib.sha256(f"{query}\0{target}".encode()).hexdigest()[:24]


def size_of(payloads: Sequence[bytes]) -> int:
    """Bytes, as they travel."""
    return sum(map(len, payloads)) + OVERHEAD * len(payloads)


def pieces(lists: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """Payloads in pieces, wherever their lists end.

    >>> [len(piece) for piece in pieces([[bytes(100_000)] * 4, [bytes(100_000)] * 3])]
    [3, 3, 1]
    """
    waiting: list[bytes] = []
    size = 0
    for some in lists:
        waiting += some
        size += size_of(some)
        if size < PIECE:
            continue
        totals = list(itertools.accumulate(map(OVERHEAD.__add__, map(len, waiting))))
        at = before = 0
        while totals[-1] - before >= PIECE:
            end = bisect_left(totals, before + PIECE, at) + 1
            yield waiting[at:end]
            at, before = end, totals[end - 1]
        waiting, size = waiting[at:], totals[-1] - before
    if waiting:
        yield waiting


class Line:
    """Pieces on their way into a stream, in order, each once: by their IDs the client may send them again."""

    def __init__(self, client: SyncClient, stream: str) -> None:
        self.stream = stream
        self.count = 0
        self._client = client
        self._under_way: deque[concurrent.futures.Future[list[int]]] = deque()

    def add(self, payloads: list[bytes], id: str) -> None:
        """One more."""
        while len(self._under_way) >= UNDER_WAY:
            self._first()
        timeout = max(OUTAGE_S, self._client.client.timeout)
        sent = self._client.publish_soon(self.stream, payloads, id=id, timeout=timeout)
        self._under_way.append(sent)
        self.count += len(payloads)

    def wait(self) -> None:
        """Until all are on disk."""
        while self._under_way:
            self._first()

    def _first(self) -> None:
        with contextlib.suppress(DuplicateIdError):  # it is there: that is what was wanted
            self._under_way.popleft().result()


def stage(client: SyncClient, name: str, lists: Iterable[list[bytes]]) -> tuple[str, int]:
    """Stage payloads in a new stream, which is gone again if that fails."""
    patiently(lambda: client.ensure(name), timeout_s=OUTAGE_S)
    line = Line(client, name)
    try:
        for number, piece in enumerate(pieces(lists)):
            line.add(piece, str(number))
        line.wait()
    except BaseException:
        with contextlib.suppress(StreamsError):
            delete(client, name)
        raise
    return name, line.count


def staged(client: SyncClient, name: str, count: int, timeout: float) -> Iterator[list[bytes]]:
    """What was staged, in the pieces in which it was: each begins with a message that has an ID."""
    piece: list[bytes] = []
    at = 0
    with client.subscribe(name, prefetch=PREFETCH) as reader:
        while at < count:
            records = reader.records(timeout)
            at = records.end
            payloads, rows = records.payloads(), _begin(records)
            for first, end in itertools.pairwise([0, *rows, len(payloads)]):
                if first in rows and piece:
                    yield piece
                    piece = []
                piece += payloads[first:end]
    if piece:
        yield piece


def _begin(records: Records) -> list[int]:
    """The rows that have IDs: most often it is the first one, and none but it."""
    if not records.has_ids:
        return []
    first = records.id(0)
    ends, _ = cast("Column", records.id_column())
    if first is not None and len(first) == int(ends[-1]):
        return [0]
    return [row for row, id in enumerate(records.ids()) if id is not None]


def delete(client: SyncClient, name: str) -> None:
    """Take a stream away; it may be gone."""
    try:
        client.admin("delete", name=name)
    except StreamsError as error:
        if error.code != "NO_STREAM":
            raise
