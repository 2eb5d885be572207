"""Call a node from sources, sinks and Spark, and retry each call while it fails with a transient error."""

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
from railgun.client.outages import OUTAGES
from railgun.client.retries import call_with_retries

if TYPE_CHECKING:
    from railgun.client.producer import Producer, Stage
    from railgun.client.sync import SyncClient, SyncSubscription
    from railgun.transport.records import Records

PREFETCH: Final = 20_000
UNDER_WAY: Final = 16  # the most pieces that are sent and not on disk yet
POLL_S: Final = 1.0  # seconds between two checks of why a publish is not answered yet
MAX_NAME_LENGTH: Final = 200
"""The most characters of a producer's name."""
T = TypeVar("T")
_Future: TypeAlias = "concurrent.futures.Future[Any]"


def producer_name(name: str) -> str:
    """Return `name`, shortened to `MAX_NAME_LENGTH`: a digest replaces the end of a longer name.

    >>> producer_name("orders"), len(producer_name("orders" * 100))
    ('orders', 200)
    """
    if len(name) <= MAX_NAME_LENGTH:
        return name
    return f"{name[: MAX_NAME_LENGTH - 17]}#{hashlib.sha256(name.encode()).hexdigest()[:16]}"


class RetryingClient:
    """A client for a source or sink that retries each call while it fails with a transient error."""

    def __init__(self, client: SyncClient, who: str, patience_s: float = math.inf) -> None:
        self.client = client
        self.who = who
        self.patience_s = patience_s
        """The most seconds for which a call is retried or waited for."""

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call_with_retries(
                call,
                waiting=lambda error: OUTAGES.begin(self.who, str(error), blocks=True),
                give_up=lambda: self.client.client.closing,
                timeout_s=self.patience_s,
            )
        finally:
            OUTAGES.end(self.who)

    def admin(self, call: str, **arguments: Any) -> Any:
        """Call `SyncClient.admin`. The call must be idempotent."""
        return self._ask(lambda: self.client.client.admin(call, **arguments))

    def _ask(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of the client in its thread, wait for it in short steps (`outcome`), and retry it."""
        loop = self.client.loop
        return self._call(lambda: self.outcome(asyncio.run_coroutine_threadsafe(ask(), loop)))

    def ensure(self, stream: str, **settings: Any) -> dict[str, Any]:
        """Call `SyncClient.ensure`, with retries."""
        return self._ask(lambda: self.client.client.ensure(stream, **settings))

    def subscribe(self, stream: str, start: int | Literal["start"] = "start") -> SyncSubscription:
        """Call `SyncClient.subscribe` without a group, with retries."""
        return self._call(lambda: self.client.subscribe(stream, start=start, prefetch=PREFETCH))

    def records(self, reader: SyncSubscription) -> Records:
        """Return the next batch of a subscription; wait for it without a time limit."""
        while True:
            try:
                records = reader.records(POLL_S)
            except TimeoutError:
                why = reader.trouble or f"messages of {reader.stream!r}"
                OUTAGES.begin(self.who, why, blocks=True)
                continue
            OUTAGES.end(self.who)
            return records

    def publish(self, stream: str, payloads: list[bytes], id: bytes) -> None:
        """Publish messages under one ID, so that they are stored exactly once; retry until they are."""
        with contextlib.suppress(DuplicateIdError):
            self._call(lambda: self.outcome(self.soon(stream, payloads, id)))

    def soon(self, stream: str, payloads: list[bytes], id: bytes | str) -> _Future:
        """Begin to publish messages under one ID; the client resends them until they are stored or refused."""
        return self.client.publish_soon(stream, payloads, id=id, timeout=math.inf)

    # ------------------------------------------------------------ producers

    def begin(self, stream: str, name: str, epoch: int | None = None, **more: Any) -> Producer:
        """Begin an epoch of a producer (`Client.producer`), with retries."""
        client = self.client.client
        return self._ask(lambda: client.producer(stream, name, epoch, **more))

    def open_stage(self, producer: Producer, label: int | None = None) -> Stage:
        """Open a stage of a producer (`Producer.open`), with retries."""
        return self._ask(lambda: producer.open(label))

    def commit(self, producer: Producer, counts: Mapping[int, int], **labels: int | None) -> int:
        """Commit stages of a producer (`Producer.commit`), with retries."""
        return self._ask(lambda: producer.commit(counts, **labels))

    def put(self, stage: Stage, payloads: list[bytes], at: int | None = None) -> _Future:
        """Begin to stage messages; the client resends them until they are stored or refused.

        `at`: as in `Stage.put_soon`.
        """

        async def put() -> None:
            await stage.put_soon(payloads, at)

        return asyncio.run_coroutine_threadsafe(put(), self.client.loop)

    def put_again(self, stage: Stage, payloads: list[bytes], at: int) -> None:
        """Stage messages again after a transient refusal; retry until they are stored."""
        self._call(lambda: self.outcome(self.put(stage, payloads, at)))

    def outcome(self, future: concurrent.futures.Future[T]) -> T:
        """Return the result of `future`, waiting in short steps that record why there is none yet.

        The record shows that a worker waits for its node and does not hang (`client.outages`). Raises `DeadlineError`
        after `patience_s` seconds.
        """
        deadline, finished = time.monotonic() + self.patience_s, True
        try:
            while True:
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    return future.result(POLL_S)
                if future.done():  # the future itself raised TimeoutError
                    return future.result()
                why = self.client.client.trouble or "the node does not answer"
                if time.monotonic() > deadline:
                    raise DeadlineError(f"not done within {self.patience_s:g} s: {why}")
                OUTAGES.begin(self.who, why, blocks=True)
        except StreamsError as error:
            finished = (
                not error.may_pass
            )  # the caller retries a transient error, so the wait goes on
            raise
        finally:
            if finished:
                OUTAGES.end(self.who)


class StagedPieces:
    """Pieces of messages that are sent, in order, to one stage of a producer."""

    def __init__(self, node: RetryingClient, stage: Stage) -> None:
        self.stage = stage
        self.count = 0
        self._node = node
        self._under_way: deque[tuple[int, list[bytes], _Future]] = deque()

    def add(self, payloads: list[bytes]) -> None:
        """Send one more piece; wait first if `UNDER_WAY` pieces are not on disk yet."""
        while len(self._under_way) >= UNDER_WAY:
            self._settle_oldest()
        sent = self._node.put(self.stage, payloads)
        self._under_way.append((self.count, payloads, sent))
        self.count += len(payloads)

    def wait(self) -> None:
        """Wait until all pieces are on disk."""
        while self._under_way:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        """Wait for the oldest piece under way; send it again if its refusal was transient.

        The pieces behind it cannot be staged before it (`STAGE_GAP`), and follow in turn.
        """
        at, payloads, sent = self._under_way.popleft()
        try:
            self._node.outcome(sent)
        except StreamsError as error:
            if not error.may_pass:
                raise
            self._node.put_again(self.stage, payloads, at)
