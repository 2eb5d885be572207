"""Send the payloads of tasks to the node, piece by piece, and define the tasks' reports. The rules are in `commit`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import WriterCommitMessage

from railgun.client.errors import DuplicateIdError
from railgun.client.sync import SyncClient
from railgun.spark.streams.feed import OUTAGE_S

PIECE_BYTES: Final = 256 << 10  # sent at once
MAX_PIECES_UNDER_WAY: Final = 16  # not on disk yet
MESSAGE_OVERHEAD_BYTES: Final = 12  # besides the payload


@dataclass
class TaskReport(WriterCommitMessage):
    """The report of a task."""

    query: str
    """The query whose rows the task wrote."""
    run: str | None
    """The session of the query's producer."""
    partition: int
    sequence: int | None = None
    """The sequence under which the messages are staged; None: there are no messages."""
    count: int = 0
    """The number of staged messages."""
    epoch: int = 0
    identity: str = ""
    """The identity of the stream when the messages were staged."""
    done: bool = False
    """True if the node says that the micro-batch was committed before; then nothing is staged."""


def size_of(payloads: Sequence[bytes]) -> int:
    """Return the bytes that these payloads take on the wire."""
    return sum(map(len, payloads)) + MESSAGE_OVERHEAD_BYTES * len(payloads)


def pieces(lists: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield payloads in pieces of about `PIECE_BYTES`, across the ends of their lists.

    >>> [len(piece) for piece in pieces([[bytes(100_000)] * 4, [bytes(100_000)] * 3])]
    [3, 3, 1]
    """
    waiting: list[bytes] = []
    size = 0
    for payloads in lists:
        waiting += payloads
        size += size_of(payloads)
        if size < PIECE_BYTES:
            continue
        totals = list(itertools.accumulate(map(MESSAGE_OVERHEAD_BYTES.__add__, map(len, waiting))))
        at = before = 0
        while totals[-1] - before >= PIECE_BYTES:
            end = bisect_left(totals, before + PIECE_BYTES, at) + 1
            yield waiting[at:end]
            at, before = end, totals[end - 1]
        waiting, size = waiting[at:], totals[-1] - before
    if waiting:
        yield waiting


class OrderedPublisher:
    """Publishes pieces to a stream in order, each once: because they have IDs, the client may send them again."""

    def __init__(self, client: SyncClient, stream: str) -> None:
        self.stream = stream
        self._client = client
        self._under_way: deque[concurrent.futures.Future[list[int]]] = deque()

    def add(self, payloads: list[bytes], id: str) -> None:
        """Send a piece; wait first if too many are under way."""
        while len(self._under_way) >= MAX_PIECES_UNDER_WAY:
            self._first()
        timeout = max(OUTAGE_S, self._client.client.timeout)
        sent = self._client.publish_soon(self.stream, payloads, id=id, timeout=timeout)
        self._under_way.append(sent)

    def wait(self) -> None:
        """Wait until all pieces are on disk."""
        while self._under_way:
            self._first()

    def _first(self) -> None:
        with contextlib.suppress(DuplicateIdError):  # the message is stored, as it should be
            self._under_way.popleft().result()
