"""Calls of the ends of flows and of Spark to their node, repeated while they fail with an error that may pass."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from railgun.client.errors import DeadlineError, DuplicateIdError, StreamsError
from railgun.client.outages import WAITS
from railgun.client.patience import patiently

if TYPE_CHECKING:
    from railgun.client.producer import Producer, Stage
    from railgun.client.sync import SyncClient, SyncSubscription
    from railgun.transport.records import Records

PREFETCH: Final = 20_000
UNDER_WAY: Final = 16  # pieces that are not on disk yet
LOOK_S: Final = 1.0  # seconds between two looks at why a publish is not answered yet
MOST_NAME: Final = 200
"""Letters of the name of a producer."""
T = TypeVar("T")
_Future: TypeAlias = "concurrent.futures.Future[Any]"


def producer_name(name: str) -> str:
    """Return the name of a producer, short enough: the end of a longer one is a digest of it.

    >>> producer_name("orders"), len(producer_name("orders" * 100))
    ('orders', 200)
    """
    if len(name) <= MOST_NAME:
        return name
    return f"{name[: MOST_NAME - 17]}#{hashlib.sha256(name.encode()).hexdigest()[:16]}"


class Patient:
    """The calls of a source or sink to its node, each repeated as long as it fails with an error that may pass."""

    def __init__(self, client: SyncClient, who: str, patience_s: float = math.inf) -> None:
        self.client = client
        self.who = who
        self.patience_s = patience_s
        """For how long a call is repeated or waited for."""

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return patiently(
                call,
                waiting=lambda error: WAITS.begin(self.who, str(error), blocks=True),
                give_up=lambda: self.client.client.closing,
                timeout_s=self.patience_s,
            )
        finally:
            WAITS.end(self.who)

    def admin(self, call: str, **arguments: Any) -> Any:
        """Do `SyncClient.admin`; only calls that may be done twice."""
        return self._ask(lambda: self.client.client.admin(call, **arguments))

    def _ask(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do something of the client in its thread, and wait for it in short calls (`outcome`); patiently."""
        loop = self.client.loop
        return self._call(lambda: self.outcome(asyncio.run_coroutine_threadsafe(ask(), loop)))

    def ensure(self, stream: str, **settings: Any) -> dict[str, Any]:
        """Do `SyncClient.ensure`."""
        return self._ask(lambda: self.client.client.ensure(stream, **settings))

    def subscribe(self, stream: str, start: int | Literal["start"] = "start") -> SyncSubscription:
        """Do `SyncClient.subscribe`, without a group."""
        return self._call(lambda: self.client.subscribe(stream, start=start, prefetch=PREFETCH))

    def records(self, reader: SyncSubscription) -> Records:
        """Return the next batch of a subscription at which there is one, however long it takes."""
        while True:
            try:
                records = reader.records(LOOK_S)
            except TimeoutError:
                why = reader.trouble or f"messages of {reader.stream!r}"
                WAITS.begin(self.who, why, blocks=True)
                continue
            WAITS.end(self.who)
            return records

    def publish(self, stream: str, payloads: list[bytes], id: bytes) -> None:
        """Publish messages under one ID, which are stored once, however long it takes."""
        with contextlib.suppress(DuplicateIdError):
            self._call(lambda: self.outcome(self.soon(stream, payloads, id)))

    def soon(self, stream: str, payloads: list[bytes], id: bytes | str) -> _Future:
        """Publish messages under one ID; the client sends them until they are stored or refused."""
        return self.client.publish_soon(stream, payloads, id=id, timeout=math.inf)

    # ------------------------------------------------------------ producers

    def begin(self, stream: str, name: str, epoch: int | None = None, **more: Any) -> Producer:
        """Do `Client.producer`."""
        client = self.client.client
        return self._ask(lambda: client.producer(stream, name, epoch, **more))

    def open_stage(self, producer: Producer, label: int | None = None) -> Stage:
        """Do `Producer.open`."""
        return self._ask(lambda: producer.open(label))

    def commit(self, producer: Producer, counts: Mapping[int, int], **labels: int | None) -> int:
        """Do `Producer.commit`."""
        return self._ask(lambda: producer.commit(counts, **labels))

    def put(self, stage: Stage, payloads: list[bytes], at: int | None = None) -> _Future:
        """Stage messages; the client sends them until they are safe or refused. `at`: as of `Stage.put_soon`."""

        async def put() -> None:
            await stage.put_soon(payloads, at)

        return asyncio.run_coroutine_threadsafe(put(), self.client.loop)

    def put_again(self, stage: Stage, payloads: list[bytes], at: int) -> None:
        """Stage messages that were refused for a reason that may pass, however long it takes."""
        self._call(lambda: self.outcome(self.put(stage, payloads, at)))

    def outcome(self, future: concurrent.futures.Future[T]) -> T:
        """Wait for a publish or a call, in short calls: a worker that waits for its node is not hanging."""
        deadline, goes_on = time.monotonic() + self.patience_s, True
        try:
            while True:
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    return future.result(LOOK_S)
                if future.done():  # it is its own TimeoutError
                    return future.result()
                why = self.client.client.trouble or "the node does not answer"
                if time.monotonic() > deadline:
                    raise DeadlineError(f"not done within {self.patience_s:g} s: {why}")
                WAITS.begin(self.who, why, blocks=True)
        except StreamsError as error:
            goes_on = not error.may_pass  # else it is tried again, and waits as before
            raise
        finally:
            if goes_on:
                WAITS.end(self.who)


class Staged:
    """Pieces on their way to what is staged under one sequence, in order."""

    def __init__(self, node: Patient, stage: Stage) -> None:
        self.stage = stage
        self.count = 0
        self._node = node
        self._under_way: deque[tuple[int, list[bytes], _Future]] = deque()

    def add(self, payloads: list[bytes]) -> None:
        """Stage one more piece."""
        while len(self._under_way) >= UNDER_WAY:
            self._first()
        sent = self._node.put(self.stage, payloads)
        self._under_way.append((self.count, payloads, sent))
        self.count += len(payloads)

    def wait(self) -> None:
        """Wait until all pieces are safe."""
        while self._under_way:
            self._first()

    def _first(self) -> None:
        """Wait for the first piece under way; if it was refused for a reason that may pass, send it again.

        Those behind it cannot be staged before it (`STAGE_GAP`), and have their turn then.
        """
        at, payloads, sent = self._under_way.popleft()
        try:
            self._node.outcome(sent)
        except StreamsError as error:
            if not error.may_pass:
                raise
            self._node.put_again(self.stage, payloads, at)
