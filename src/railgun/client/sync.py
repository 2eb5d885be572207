"""The synchronous client, for programs without an event loop: the same calls, each of which waits for its answer.

>>> from railgun.client.sync import connect_sync
>>> connect_sync("127.0.0.1:1", secret="00", timeout=0.1)
Traceback (most recent call last):
railgun.client.errors.NoNodeError: no node at 127.0.0.1:1: ...

Rules:

1. A background thread runs the event loop of the asyncio client. Any thread may use the synchronous client.
2. A subscription takes all available messages from the asyncio client and returns them one by one. In an exclusive
   group it takes one message at a time, since the following ones may be recalled.
3. Ctrl-C interrupts a call that waits, not the client.
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
from railgun.client.client import PREFETCH, TIMEOUT, Client, Payload, connect_to_address
from railgun.client.errors import StreamsError
from railgun.client.message import Message
from railgun.client.producer import Transaction
from railgun.client.publisher import Acks
from railgun.client.subscription import Start, Subscription
from railgun.transport.records import Records

T = TypeVar("T")


class SyncMessage(Message):
    """A message of a `SyncSubscription`: its `respond` waits, and is no coroutine."""

    __slots__ = ()

    def respond(self, payload: Payload, *, confirm: bool = True) -> None:  # type: ignore[override]
        """Answer this request with `payload` (`Client.respond`)."""
        self.subscription.client.respond(self.response, payload, confirm=confirm)


class SyncTransaction:
    """A `Transaction`, for a program without an event loop. Made by `SyncClient.transaction`."""

    def __init__(self, client: SyncClient, transaction: Transaction) -> None:
        self._client = client
        self._transaction = transaction

    @property
    def offsets(self) -> range:
        """The offsets of the messages, once the transaction is committed."""
        return self._transaction.offsets

    def put(self, payload: Payload) -> None:
        """Append one message to the transaction."""
        self._client.wait(self._transaction.put(payload))

    def put_all(self, payloads: Iterable[Payload]) -> None:
        """Append messages to the transaction; return when the node has them on disk."""
        self._client.wait(self._transaction.put_all(payloads))


class SyncClient:
    """A synchronous connection to a node. `connect_sync` returns it; `with` closes it."""

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop, thread: threading.Thread):
        self.client = client
        self.loop = loop
        self._thread = thread

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the asyncio client in its thread, and return its result."""
        if not self._thread.is_alive():
            work.close()
            raise StreamsError("CLOSED", "the client is closed")
        return _wait(self.loop, work)

    def close(self) -> None:
        """Close the connection (`Client.close`), and end the thread."""
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

    # ------------------------------------------------------------ publishing, requests

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
        """Publish a message, as `Client.publish`; return its offset (in an ephemeral stream: how many received it)."""
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
        """Publish messages in this order, as `Client.publish_many`; return the offset of each.

        With one ID for all, or with `atomic`, either all of them are stored or none.
        """
        options: dict[str, Any] = {"topic": topic, "timeout": timeout, "acks": acks}
        return self.wait(
            self.client.publish_many(stream, payloads, ids=ids, id=id, atomic=atomic, **options)
        )

    @contextlib.contextmanager
    def transaction(self, stream: str) -> Iterator[SyncTransaction]:
        """Publish messages that become visible together: committed when the block ends, dropped if it raises."""
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
        """Begin a `publish_many` and return a future of the offsets, which is done when the messages are on disk."""
        return asyncio.run_coroutine_threadsafe(
            self.client.publish_many(stream, payloads, id=id, timeout=timeout), self.loop
        )

    def request(
        self, stream: str, payload: Payload, *, topic: str = "", timeout: float | None = None
    ) -> bytes:
        """Send a request to the listeners of an ephemeral stream, as `Client.request`; return the first answer."""
        return self.wait(self.client.request(stream, payload, topic=topic, timeout=timeout))

    def respond(self, response: str, payload: Payload, *, confirm: bool = True) -> None:
        """Answer a request by the name of its response stream, as `Client.respond`."""
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
        subscription = self.wait(
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
        return SyncSubscription(self, subscription, one_by_one=exclusive or bool(consumer))

    # ------------------------------------------------------------ streams

    def admin(self, call: str, **arguments: Any) -> Any:
        """Call an administrative command of the node, as `Client.admin`."""
        return self.wait(self.client.admin(call, **arguments))

    def ensure(self, stream: str, mode: str = "warn", **settings: Any) -> dict[str, Any]:
        """Create a stream, or check or change its settings, as `Client.ensure`."""
        return self.wait(self.client.ensure(stream, mode, **settings))


class SyncSubscription:
    """An iterator over the messages of one stream, which ends when the subscription is closed."""

    message = SyncMessage

    def __init__(self, client: SyncClient, inner: Subscription, one_by_one: bool) -> None:
        self.client = client
        self.inner = inner
        """The asyncio subscription, which lives in the client's thread."""
        inner.facade = self
        self._batch_size = 1 if one_by_one else 1000
        self._ready: deque[SyncMessage] = deque()
        self._forfeits = 0  # `Subscription.forfeits` when messages were taken last
        self._blocked_until = 0.0  # no message is returned before this time (`time.monotonic`)

    @property
    def persistent(self) -> bool:
        """Whether the stream is persistent: only then are its messages acked."""
        return self.inner.persistent

    @property
    def stream(self) -> str:
        """The name of the stream that is read."""
        return self.inner.stream

    @property
    def trouble(self) -> str:
        """Why no messages can come now; empty: nothing is wrong."""
        return self.inner.trouble

    def __iter__(self) -> Iterator[SyncMessage]:
        return self

    def __next__(self) -> SyncMessage:
        return self.next()

    def next(self, timeout: float | None = None) -> SyncMessage:
        """Return the next message.

        Raises `TimeoutError` if none arrives within `timeout` seconds, and `StopIteration` if the subscription is
        closed.
        """
        if not self._has_ready():
            self._ready.extend(self.batch(self._batch_size, timeout))
        self._wait_while_blocked(timeout)
        return self._ready.popleft()

    def _has_ready(self) -> bool:
        """Return whether messages that were taken wait here; drop them if they are no longer this consumer's."""
        if self._ready and self._forfeits != self.inner.forfeits:
            self._ready.clear()
        return bool(self._ready)

    def _wait_while_blocked(self, timeout: float | None) -> None:
        """Wait until the delay of a blocking nack is over; raise `TimeoutError` if it exceeds `timeout` seconds."""
        left = self._blocked_until - time.monotonic()
        if left <= 0:
            return
        if timeout is not None and timeout < left:
            time.sleep(timeout)
            raise TimeoutError
        time.sleep(left)

    def batch(self, most: int = 1000, timeout: float | None = None) -> list[SyncMessage]:
        """Return the messages that have arrived, from one up to `most`, as `Subscription.batch`."""
        if self._has_ready():
            self._wait_while_blocked(timeout)
            return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
        return self._take(self.inner.batch(most, timeout))  # type: ignore[arg-type]

    def records(self, timeout: float | None = None) -> Records:
        """Return the next batch as it is stored, for a subscription without a group, as `Subscription.records`."""
        return self._take(self.inner.records(timeout))

    def _take(self, work: Coroutine[Any, Any, T]) -> T:
        async def taken() -> T | None:
            try:
                result = await work
            except StopAsyncIteration:
                return None
            self._forfeits = self.inner.forfeits  # in the client's thread, so that both agree
            return result

        result = self.client.wait(taken())
        if result is None:
            raise StopIteration
        return result

    # ------------------------------------------------------------ acks and nacks

    def ack(self, message: Message) -> None:
        """Acknowledge a message: it is done. Without a group this does nothing."""
        self.inner.check_acks()
        self.client.loop.call_soon_threadsafe(self.inner.ack, message)

    def ack_all(self, messages: Sequence[Message]) -> None:
        """Acknowledge messages: they are done. Without a group this does nothing."""
        self.inner.check_acks()
        self.client.loop.call_soon_threadsafe(self.inner.ack_all, messages)

    def nack(self, message: Message, delay: float, reason: str, *, block: bool = False) -> None:
        """Refuse a message: have it redelivered after `delay` seconds; `block`: nothing else is delivered before.

        `reason` is recorded in the dead letter, if the message becomes one.
        """
        self.inner.check_acks()
        if block:
            self._blocked_until = max(self._blocked_until, time.monotonic() + delay)
        nack = partial(self.inner.nack, message, delay, reason, block=block)
        self.client.loop.call_soon_threadsafe(nack)

    def in_progress(self, message: Message) -> None:
        """Tell the node that a message is still being processed: its `ack_wait` starts again."""
        self.inner.check_acks()
        self.client.loop.call_soon_threadsafe(self.inner.in_progress, message)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the node has all acks and nacks on disk, as `Subscription.flush`."""
        self.client.wait(self.inner.flush(timeout))

    def close(self) -> None:
        """End the subscription. Messages that were not acked go to other members, and do not count as delivered."""
        self.client.wait(self.inner.close())

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
    """Connect to a node and return a synchronous client; arguments and errors as of `railgun.connect`."""
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
    """Connect to the node with this address and return a synchronous client; raise `NoNodeError` if that fails."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run_loop, args=(loop,), name="railgun-client", daemon=True)
    thread.start()
    try:
        connecting = connect_to_address(
            address, name=name, timeout=timeout, tls=tls, wait_for_quorum=wait_for_quorum
        )
        return SyncClient(_wait(loop, connecting), loop, thread)
    except BaseException:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        raise


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
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
        future.cancel()  # no effect if the future itself has failed
        raise
