"""The client for programs without an event loop: the same calls, each of which waits for its answer.

>>> from railgun.client.sync import connect_sync
>>> connect_sync("127.0.0.1:1", secret="00", timeout=0.1)
Traceback (most recent call last):
railgun.client.errors.NoNodeError: no node at 127.0.0.1:1: ...

Rules:

1. One thread of its own runs the event loop of the client; any thread may use the client.
2. A subscription takes as many messages from the client as there are, and gives them one by one; of an exclusive group
   one at a time, since what follows may be recalled.
3. Ctrl-C ends a call that waits, not the client.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ssl
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from railgun.client.address import DATA, Address
from railgun.client.checks import LEFT_OUT
from railgun.client.client import PREFETCH, TIMEOUT, Client, Payload, reach
from railgun.client.errors import StreamsError
from railgun.client.message import Message
from railgun.client.producer import Transaction
from railgun.client.publisher import Acks
from railgun.client.subscription import Start, Subscription
from railgun.transport.records import Records

T = TypeVar("T")


class SyncMessage(Message):
    """A message, for a program without an event loop."""

    __slots__ = ()

    def respond(self, payload: Payload, *, confirm: bool = True) -> None:  # type: ignore[override]
        """Answer a request."""
        self.subscription.client.respond(self.response, payload, confirm=confirm)


class SyncTransaction:
    """A `Transaction`, for a program without an event loop. Made by `SyncClient.transaction`."""

    def __init__(self, client: SyncClient, transaction: Transaction) -> None:
        self._client = client
        self._transaction = transaction

    @property
    def offsets(self) -> range:
        """Where the messages are, when the transaction is committed."""
        return self._transaction.offsets

    def put(self, payload: Payload) -> None:
        """Put one message behind those that were put before."""
        self._client.wait(self._transaction.put(payload))

    def put_all(self, payloads: Iterable[Payload]) -> None:
        """Put messages behind those that were put before; returns when they are safe."""
        self._client.wait(self._transaction.put_all(payloads))


class SyncClient:
    """A connection to a node. Made by `connect_sync`; `with` closes it."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop, thread: threading.Thread):
        self.client = client
        self.loop = loop
        self._thread = thread

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something of the client in its thread, and wait for it."""
        if not self._thread.is_alive():
            work.close()
            raise StreamsError("CLOSED", "the client is closed")
        return _wait(self.loop, work)

    def close(self) -> None:
        """Say good-bye, and end the thread."""
        if self._thread.is_alive():
            try:
                self.wait(self.client.close())
            finally:
                self.loop.call_soon_threadsafe(self.loop.stop)
                self._thread.join()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------ publishing, asking

    def publish(
        self,
        stream: str,
        payload: Payload,
        *,
        id: str | bytes | None = None,
        topic: str = "",
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        acks: Acks = "quorum",
    ) -> int:
        """Publish a message; its offset, when it is on disk (of an ephemeral stream: how many matched)."""
        return self.wait(
            self.client.publish(
                stream, payload, id=id, topic=topic, headers=headers, timeout=timeout, acks=acks
            )
        )

    def publish_many(
        self,
        stream: str,
        payloads: Sequence[Payload],
        *,
        ids: Sequence[str | bytes | None] | None = None,
        id: str | bytes | None = None,
        topic: str = "",
        timeout: float | None = None,
        acks: Acks = "quorum",
        atomic: bool = False,
    ) -> list[int]:
        """Publish messages in this order; the offset of each.

        With one ID for all, or `atomic` (see `Client.publish_many`): wholly or not at all.
        """
        options: dict[str, Any] = {"topic": topic, "timeout": timeout, "acks": acks}
        return self.wait(
            self.client.publish_many(stream, payloads, ids=ids, id=id, atomic=atomic, **options)
        )

    @contextlib.contextmanager
    def transaction(self, stream: str) -> Iterator[SyncTransaction]:
        """Publish messages that are seen all together, or not at all: committed at the end, dropped if it raises."""
        context = self.client.transaction(stream)
        transaction = SyncTransaction(self, self.wait(context.__aenter__()))
        try:
            yield transaction
        except BaseException as error:
            self.wait(context.__aexit__(type(error), error, error.__traceback__))
            raise
        self.wait(context.__aexit__(None, None, None))

    def publish_soon(
        self,
        stream: str,
        payloads: Sequence[Payload],
        *,
        id: str | bytes | None = None,
        timeout: float | None = None,
    ) -> concurrent.futures.Future[list[int]]:
        """As `publish_many`, but do not wait: the future says when they are on disk."""
        return asyncio.run_coroutine_threadsafe(
            self.client.publish_many(stream, payloads, id=id, timeout=timeout), self.loop
        )

    def request(
        self, stream: str, payload: Payload, *, topic: str = "", timeout: float | None = None
    ) -> bytes:
        """Ask whoever listens; the first answer."""
        return self.wait(self.client.request(stream, payload, topic=topic, timeout=timeout))

    def respond(self, response: str, payload: Payload, *, confirm: bool = True) -> None:
        """Answer a request, by the name of its response stream."""
        self.wait(self.client.respond(response, payload, confirm=confirm))

    # ------------------------------------------------------------ consuming

    def subscribe(
        self,
        stream: str,
        *,
        group: str = LEFT_OUT,
        exclusive: bool = False,
        consumer: str = LEFT_OUT,
        start: Start | int = "start",
        prefetch: int = PREFETCH,
        matcher: str | None = None,
        ack_wait: float = 0.0,
        timeout: float | None = None,
        identity: str = "",
    ) -> SyncSubscription:
        """Subscribe to a stream, as `Client.subscribe`; return its messages as an iterator."""
        made = self.wait(
            self.client.subscribe(
                stream,
                group=group,
                exclusive=exclusive,
                consumer=consumer,
                start=start,
                prefetch=prefetch,
                matcher=matcher,
                ack_wait=ack_wait,
                timeout=timeout,
                identity=identity,
            )
        )
        return SyncSubscription(self, made, one_by_one=exclusive or bool(consumer))

    # ------------------------------------------------------------ streams

    def admin(self, call: str, **arguments: Any) -> Any:
        """Ask the node to do something with its streams."""
        return self.wait(self.client.admin(call, **arguments))

    def ensure(self, stream: str, mode: str = "warn", **settings: Any) -> dict[str, Any]:
        """Make a stream what it is asked to be, in a cluster in this `region`: what was done, and what differs."""
        return self.wait(self.client.ensure(stream, mode, **settings))


class SyncSubscription:
    """Messages of one stream: an iterator, which ends when the subscription is closed."""

    message = SyncMessage

    def __init__(self, client: SyncClient, under: Subscription, one_by_one: bool) -> None:
        self.client = client
        self.under = under
        """The subscription in the client's thread."""
        under.face = self
        self._most = 1 if one_by_one else 1000
        self._ready: deque[SyncMessage] = deque()
        self._forfeits = 0  # of the subscription, when messages were taken last
        self._blocked_until = 0.0  # nothing of it is given before, by the steady clock

    @property
    def persistent(self) -> bool:
        """Whether its messages are acked."""
        return self.under.persistent

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return self.under.stream

    @property
    def trouble(self) -> str:
        """Why nothing comes now; empty: nothing stands against it."""
        return self.under.trouble

    def __iter__(self) -> Iterator[SyncMessage]:
        return self

    def __next__(self) -> SyncMessage:
        return self.next()

    def next(self, timeout: float | None = None) -> SyncMessage:
        """The next message; `TimeoutError` if none comes in time, `StopIteration` if none will."""
        if not self._has_ready():
            self._ready.extend(self.batch(self._most, timeout))
        self._wait_while_blocked(timeout)
        return self._ready.popleft()

    def _has_ready(self) -> bool:
        """Return whether messages that were taken wait here; drop them if they are not this consumer's any more."""
        if self._ready and self._forfeits != self.under.forfeits:
            self._ready.clear()
        return bool(self._ready)

    def _wait_while_blocked(self, timeout: float | None) -> None:
        """Wait until a delay that blocks is over; `TimeoutError` if that takes longer than `timeout` seconds."""
        left = self._blocked_until - time.monotonic()
        if left <= 0:
            return
        if timeout is not None and timeout < left:
            time.sleep(timeout)
            raise TimeoutError
        time.sleep(left)

    def batch(self, most: int = 1000, timeout: float | None = None) -> list[SyncMessage]:
        """The messages that are there, at least one."""
        if self._has_ready():
            self._wait_while_blocked(timeout)
            return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
        return self._take(self.under.batch(most, timeout))  # type: ignore[arg-type]

    def records(self, timeout: float | None = None) -> Records:
        """The next batch as it lies on disk; for a subscription without a group."""
        return self._take(self.under.records(timeout))

    def _take(self, work: Coroutine[Any, Any, T]) -> T:
        async def taken() -> T | None:
            try:
                found = await work
            except StopAsyncIteration:
                return None
            self._forfeits = self.under.forfeits  # in the client's thread: nothing comes between
            return found

        found = self.client.wait(taken())
        if found is None:
            raise StopIteration
        return found

    # ------------------------------------------------------------ what is said of messages

    def ack(self, message: Message) -> None:
        """It is done."""
        self.under.check_acks()
        self.client.loop.call_soon_threadsafe(self.under.ack, message)

    def ack_all(self, messages: Sequence[Message]) -> None:
        """They are done."""
        self.under.check_acks()
        self.client.loop.call_soon_threadsafe(self.under.ack_all, messages)

    def nack(self, message: Message, delay: float, reason: str, *, block: bool = False) -> None:
        """Let a message come again after `delay` seconds; `block`: nothing else comes before."""
        self.under.check_acks()
        if block:
            self._blocked_until = max(self._blocked_until, time.monotonic() + delay)
        nack = partial(self.under.nack, message, delay, reason, block=block)
        self.client.loop.call_soon_threadsafe(nack)

    def in_progress(self, message: Message) -> None:
        """It is being worked on."""
        self.under.check_acks()
        self.client.loop.call_soon_threadsafe(self.under.in_progress, message)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the node has all acks on disk."""
        self.client.wait(self.under.flush(timeout))

    def close(self) -> None:
        """No more; what was not acked goes to others, and does not count as delivered."""
        self.client.wait(self.under.close())

    def __enter__(self) -> SyncSubscription:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def connect_sync(
    where: str | Sequence[str] | None = None,
    *,
    secret: bytes | str | None = None,
    data: str | Path = DATA,
    name: str = "",
    timeout: float = TIMEOUT,
    tls: ssl.SSLContext | None = None,
    wait_for_quorum: bool = False,
) -> SyncClient:
    """As `railgun.connect`, for a program without an event loop."""
    address = Address.find(where, secret=secret, data=data)
    return connect_to(address, name=name, timeout=timeout, tls=tls, wait_for_quorum=wait_for_quorum)


def connect_to(
    address: Address,
    *,
    name: str = "",
    timeout: float = TIMEOUT,
    tls: ssl.SSLContext | None = None,
    wait_for_quorum: bool = False,
) -> SyncClient:
    """A client of the node with this address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_turn, args=(loop,), name="railgun-client", daemon=True)
    thread.start()
    try:
        made = reach(address, name=name, timeout=timeout, tls=tls, wait_for_quorum=wait_for_quorum)
        return SyncClient(_wait(loop, made), loop, thread)
    except BaseException:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        raise


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        with contextlib.suppress(RuntimeError):
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _wait(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # of no effect if it was its own error
        raise
