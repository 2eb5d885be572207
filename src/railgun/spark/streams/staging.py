"""What tasks send to the node, piece by piece, and what they report of it. The rules are in `commit`."""

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

PIECE: Final = 256 << 10  # bytes sent at once
UNDER_WAY: Final = 16  # pieces that are not on disk yet
OVERHEAD: Final = 12  # bytes of a message besides its payload


@dataclass
class Written(WriterCommitMessage):
    """What a task reports."""

    query: str
    """Whose rows they are."""
    run: str | None
    """The session of the query's producer."""
    partition: int
    sequence: int | None = None
    """What they are staged under; None: there are none."""
    count: int = 0
    """How many messages that are."""
    epoch: int = 0
    identity: str = ""
    """Of the stream, when they were staged."""
    done: bool = False
    """The node says that the micro-batch was committed before: nothing is staged."""


def size_of(payloads: Sequence[bytes]) -> int:
    """Return their bytes, as they travel."""
    return sum(map(len, payloads)) + OVERHEAD * len(payloads)


def pieces(lists: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield payloads in pieces, wherever their lists end.

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
        self._client = client
        self._under_way: deque[concurrent.futures.Future[list[int]]] = deque()

    def add(self, payloads: list[bytes], id: str) -> None:
        """Send one more."""
        while len(self._under_way) >= UNDER_WAY:
            self._first()
        timeout = max(OUTAGE_S, self._client.client.timeout)
        sent = self._client.publish_soon(self.stream, payloads, id=id, timeout=timeout)
        self._under_way.append(sent)

    def wait(self) -> None:
        """Wait until all are on disk."""
        while self._under_way:
            self._first()

    def _first(self) -> None:
        with contextlib.suppress(DuplicateIdError):  # it is there: that is what was wanted
            self._under_way.popleft().result()
