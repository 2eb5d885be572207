"""A client: one connection to a node, for everything.

Rules:

1. `publish` returns when the message is on the node's disk. Messages of many tasks travel together: those that come up
   in one turn of the event loop, and those that come up while as many publishes of the stream as may be are under way.
2. Every call has a deadline. If it passes, what was asked for may have been done or not.
3. A connection that is lost is made again, with growing pauses, and subscriptions with it. Publishes that were not
   answered are sent again if all their messages have IDs: then they cannot come twice. Others raise `CONNECTION_LOST`:
   they may be stored or not, and only the caller knows whether twice does harm.
4. A connection that says nothing for `SILENCE` seconds is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message as Command

from railgun.client.errors import (
    DeadlineError,
    DuplicateIdError,
    NoAnswerError,
    NoNodeError,
    StreamsError,
)
from railgun.client.subscription import Start, Subscription
from railgun.wire.commands import LARGEST, VERSION, Blob, Frame, FrameError, FrameReader, encode
from railgun.wire.connection import Connection
from railgun.wire.proto import streams_pb2 as p
from railgun.wire.records import Records, build

TIMEOUT: Final = 30.0
PING: Final = 5.0
SILENCE: Final = 20.0
AGAIN: Final = (0.05, 2.0)  # seconds to the next try: at first, and at most
UNDER_WAY: Final = 4  # publishes of a stream that are not answered
ENOUGH: Final = 256 << 10  # bytes that do not wait for more
PREFETCH: Final = 1000
Payload = bytes | str


class _Batch:
    """Messages of one stream that wait to be sent, or to be answered."""

    __slots__ = ("futures", "headers", "ids", "payloads", "size", "stream", "topic")

    def __init__(self, stream: str, topic: str) -> None:
        self.stream = stream
        self.topic = topic
        self.payloads: list[bytes] = []
        self.ids: list[bytes | None] = []
        self.headers: list[bytes | None] = []
        self.futures: list[
            tuple[asyncio.Future[Any], int]
        ] = []  # and how many messages each is for
        self.size = 0

    @property
    def safe(self) -> bool:
        """Whether it can be sent twice without harm."""
        return all(self.ids)


class Client:
    """A connection to a node. Made by `connect`."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        *,
        name: str = "",
        timeout: float = TIMEOUT,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.where = (host, port)
        self.timeout = timeout
        self._secret, self._name, self._tls = secret, name, tls
        self._connection: Connection | None = None
        self._reader = FrameReader()
        self._open = asyncio.Event()
        self._closing = False
        self._running: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[None] | None = None
        self._heard = 0.0
        self._numbers = itertools.count(1)
        self._channels = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._subscriptions: dict[int, Subscription] = {}
        self._waiting: dict[tuple[str, str], deque[_Batch]] = {}  # all but the last are full
        self._under_way: dict[int, _Batch] = {}
        self._counts: dict[str, int] = {}
        self._out: list[Blob] = []
        self._sending = False
        self._last_error = ""

    # ------------------------------------------------------------ the connection

    async def open(self) -> None:
        """Connect; raises if it cannot be done within the timeout."""
        self._running = self.loop.create_task(self._run())
        opened = self.loop.create_task(self._open.wait())
        await asyncio.wait(
            [opened, self._running], timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED
        )
        opened.cancel()
        if self._running.done() or not self._open.is_set():
            await self.close()
            host, port = self.where
            raise NoNodeError(f"no node at {host}:{port}: {self._last_error or 'no answer'}")

    async def _run(self) -> None:
        pause, first = AGAIN[0], True
        while not self._closing:
            try:
                await self._connect()
                pause, first = AGAIN[0], False
                await self._alive()
            except (OSError, StreamsError, FrameError) as error:
                self._last_error = getattr(error, "text", str(error))
            if first and ("secret" in self._last_error or "version" in self._last_error):
                return  # it will not become right by trying
            self._disconnected()
            if not self._closing:
                await asyncio.sleep(pause)
                pause = min(2 * pause, AGAIN[1])

    async def _connect(self) -> None:
        self._reader = FrameReader()
        opened: asyncio.Future[None] = self.loop.create_future()
        lost: asyncio.Future[None] = self.loop.create_future()

        def made(connection: Connection) -> None:
            if not opened.done():
                opened.set_result(None)

        def gone(connection: Connection, error: Exception | None) -> None:
            told = StreamsError("CONNECTION_LOST", str(error or "the node closed the connection"))
            for future in (opened, lost):
                if not future.done():
                    future.set_exception(told)
            lost.exception()
            if not opened.cancelled():
                opened.exception()

        who = {"version": VERSION, "name": self._name}
        _, connection = await self.loop.create_connection(
            lambda: Connection(self._secret, made, self._received, gone, who),
            *self.where,
            ssl=self._tls,
        )
        await opened
        self._connection, self._lost = connection, lost
        self._heard = self.loop.time()
        await self._resume()
        self._open.set()

    async def _resume(self) -> None:
        """Make the subscriptions again, and send what can be sent again."""
        for subscription in list(self._subscriptions.values()):
            self.loop.create_task(self._again(subscription))
        for number, batch in list(self._under_way.items()):
            self._send_batch(number, batch)
        for key in list(self._waiting):
            self._try_send(key)

    async def _again(self, subscription: Subscription) -> None:
        try:
            await self.ask(lambda n: self.send(subscription.request(n), (), subscription.channel))
        except StreamsError as error:
            if error.code not in ("CONNECTION_LOST", "DEADLINE"):
                subscription.failed(error)

    async def _alive(self) -> None:
        """Ping, until the connection is lost."""
        assert self._lost is not None
        while True:
            await asyncio.wait([self._lost], timeout=PING)
            if self._lost.done():
                self._lost.result()
            if self.loop.time() - self._heard > SILENCE:
                assert self._connection is not None
                self._connection.transport.abort()
                raise StreamsError("CONNECTION_LOST", "the node says nothing")
            self.send(p.Ping(number=1))

    def _disconnected(self) -> None:
        self._open.clear()
        self._connection = None
        self._out = []
        told = StreamsError("CONNECTION_LOST", self._last_error)
        for number, batch in list(self._under_way.items()):
            if not batch.safe or self._closing:  # the others will be sent again
                _fail(self._done(number), told)
        answers, self._answers = self._answers, {}
        for future in answers.values():
            if not future.done():
                future.set_exception(told)
                future.exception()

    async def close(self) -> None:
        """Say good-bye: what is under way is waited for, as long as a call may take."""
        if not self._closing:
            if self._open.is_set():
                pending = [f for b in self._pending() for f, _ in b.futures if not f.done()]
                if pending:
                    await asyncio.wait(pending, timeout=self.timeout)
                leaving = [self.loop.create_task(s.close()) for s in self._subscriptions.values()]
                if leaving:
                    await asyncio.wait(leaving, timeout=self.timeout)
                await asyncio.sleep(0)  # what was sent in this turn
                self._go()
            self._closing = True
            if self._connection is not None:
                self._connection.close()
            if self._running is not None:
                self._running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._running
            self._disconnected()
            for subscription in self._subscriptions.values():
                subscription.ended()

    def _pending(self) -> Iterable[_Batch]:
        return itertools.chain(*self._waiting.values(), self._under_way.values())

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # ------------------------------------------------------------ frames

    def send(self, command: Command, blobs: Sequence[Blob] = (), channel: int = 0) -> None:
        """Send a frame, with the others of this turn; nothing, if there is no connection."""
        if self._connection is None:
            return
        self._out += encode(command, blobs, channel)
        if not self._sending:
            self._sending = True
            self.loop.call_soon(self._go)

    def _go(self) -> None:
        self._sending = False
        out, self._out = self._out, []
        if out and self._connection is not None:
            self._connection.transport.write(b"".join(out) if len(out) > 1 else out[0])

    def _received(self, connection: Connection, data: bytes) -> None:
        self._heard = self.loop.time()
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except (FrameError, ValueError) as error:
            connection.close(error)

    def _take(self, frame: Frame) -> None:
        command, channel = frame.command, frame.channel
        match command:
            case p.Deliver():
                subscription = self._subscriptions.get(channel)
                if subscription is not None:
                    subscription.delivered(command, frame.blob)
            case p.Published() if command.request in self._under_way:
                self._published(command)
            case p.Failed() if command.request in self._under_way:
                batch = self._done(command.request)
                _fail(batch, StreamsError(command.code, command.text))
            case p.Subscribed():
                # Now, and not when who waits for it comes to run: messages may be right behind.
                if channel in self._subscriptions:
                    self._subscriptions[channel].began(command)
                future = self._answers.pop(command.request, None)
                if future is not None and not future.done():
                    future.set_result((command, frame.blob))
            case p.Missed() | p.Lost() | p.Recalled():
                self._tell(channel, command)
            case p.Ping():
                self.send(p.Pong(number=command.number))
            case _:
                future = self._answers.pop(getattr(command, "request", 0), None)
                if future is None:
                    self._tell(channel, command)
                elif isinstance(command, p.Failed):
                    if not future.done():
                        future.set_exception(StreamsError(command.code, command.text))
                elif not future.done():
                    future.set_result((command, frame.blob))

    def _tell(self, channel: int, command: Any) -> None:
        subscription = self._subscriptions.get(channel)
        if subscription is not None:
            subscription.told(command)

    async def ask(self, send: Callable[[int], object], timeout: float | None = None) -> Any:
        """Send something with a number, and wait for the command that answers it."""
        return (await self._ask(send, timeout))[0]

    async def _ask(self, send: Callable[[int], object], timeout: float | None) -> Any:
        number = next(self._numbers)
        future: asyncio.Future[Any] = self.loop.create_future()
        try:
            async with asyncio.timeout(self.timeout if timeout is None else timeout):
                if self._connection is None:
                    await self._open.wait()
                self._answers[number] = future
                send(number)
                return await future
        except TimeoutError as error:
            raise DeadlineError("the node did not answer in time") from error
        finally:
            self._answers.pop(number, None)

    # ------------------------------------------------------------ publishing

    async def publish(
        self,
        stream: str,
        payload: Payload,
        *,
        id: str | bytes | None = None,
        topic: str = "",
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Publish a message; its offset, when it is on disk (of an ephemeral stream: how many matched)."""
        future = self._put(stream, topic, [payload], [id], [headers])
        return int((await self._within(future, timeout))[0])

    async def publish_many(
        self,
        stream: str,
        payloads: Sequence[Payload],
        *,
        ids: Sequence[str | bytes | None] | None = None,
        topic: str = "",
        timeout: float | None = None,
    ) -> list[int]:
        """Publish messages in this order; the offset of each."""
        if not payloads:
            return []
        futures, at, size = [], 0, 0
        for n, payload in enumerate(payloads, 1):
            size += len(payload)
            if size >= ENOUGH or n == len(payloads):
                some = ids[at:n] if ids is not None else None
                futures.append(self._put(stream, topic, payloads[at:n], some, None))
                at, size = n, 0
        every = await self._within(asyncio.gather(*futures), timeout)
        return list(itertools.chain.from_iterable(every))

    async def _within(self, future: asyncio.Future[Any], timeout: float | None) -> Any:
        try:
            async with asyncio.timeout(self.timeout if timeout is None else timeout):
                return await future
        except TimeoutError as error:
            raise DeadlineError("not published in time: it may be stored or not") from error

    def _put(
        self,
        stream: str,
        topic: str,
        payloads: Sequence[Payload],
        ids: Sequence[str | bytes | None] | None,
        headers: Sequence[Mapping[str, str] | None] | None,
    ) -> asyncio.Future[Any]:
        if self._closing:
            raise StreamsError("CLOSED", "the client is closed")
        key = (stream, topic)
        line = self._waiting.get(key)
        if line is None:
            line = self._waiting[key] = deque()
            self.loop.call_soon(self._try_send, key)
        if not line or line[-1].size >= ENOUGH:
            line.append(_Batch(stream, topic))
        batch = line[-1]
        future: asyncio.Future[Any] = self.loop.create_future()
        given = list(map(_bytes, payloads))
        batch.payloads += given
        batch.ids += [None if x is None else _bytes(x) for x in ids] if ids else [None] * len(given)
        batch.headers += (
            [json.dumps(dict(x)).encode() if x else None for x in headers]
            if headers
            else [None] * len(given)
        )
        batch.futures.append((future, len(given)))
        batch.size += sum(map(len, given))
        if batch.size >= ENOUGH:
            self._try_send(key)
        return future

    def _try_send(self, key: tuple[str, str]) -> None:
        """Send what waits, unless enough is under way and it is little."""
        line = self._waiting.get(key)
        while line and self._connection is not None:
            under_way = self._counts.get(key[0], 0)
            if under_way >= UNDER_WAY or (under_way > 1 and line[0].size < ENOUGH):
                return
            batch = line.popleft()
            if not line:
                del self._waiting[key]
            number = next(self._numbers)
            self._under_way[number] = batch
            self._counts[key[0]] = under_way + 1
            try:
                self._send_batch(number, batch)
            except Exception as error:
                self._done(number)
                _fail(batch, error)

    def _send_batch(self, number: int, batch: _Batch) -> None:
        ids = batch.ids if any(batch.ids) else None
        headers = batch.headers if any(batch.headers) else None
        blobs = [build(batch.payloads, ids, headers)]
        if len(blobs[0]) > LARGEST - 4096:
            raise StreamsError(
                "TOO_LARGE", f"{len(blobs[0]):,} bytes at once: {LARGEST - 4096:,} are the most"
            )
        told = p.Publish(request=number, stream=batch.stream, topic=batch.topic)
        self.send(told, blobs)

    def _done(self, number: int) -> _Batch:
        batch = self._under_way.pop(number)
        self._counts[batch.stream] -= 1
        for key in [key for key in self._waiting if key[0] == batch.stream]:
            self.loop.call_soon(self._try_send, key)
        return batch

    def _published(self, answer: p.Published) -> None:
        batch = self._done(answer.request)
        count = len(batch.payloads)
        if not answer.stored and not answer.refused:  # ephemeral
            for future, some in batch.futures:
                if not future.done():
                    future.set_result([answer.matched] * some)
            return
        offsets: list[int] = list(range(answer.base, answer.base + count))
        refused = {one.index: one for one in answer.refused}
        if refused:
            following = itertools.count(answer.base)
            offsets = [refused[n].offset if n in refused else next(following) for n in range(count)]
        at = 0
        for future, some in batch.futures:
            wrong = [
                refused[n]
                for n in range(at, at + some)
                if n in refused and refused[n].code != "OK"
            ] if refused else []  # fmt: skip
            if future.done():
                pass
            elif wrong:
                future.set_exception(_refusal(wrong[0], batch.ids[wrong[0].index]))
            else:
                future.set_result(offsets[at : at + some])
            at += some

    # ------------------------------------------------------------ requests

    async def request(
        self,
        stream: str,
        payload: Payload,
        *,
        topic: str = "",
        timeout: float = TIMEOUT,
    ) -> bytes:
        """Ask whoever listens; the first answer. The node says when nobody is there, or nobody answers in time."""
        name = f"r{secrets.token_hex(12)}"
        blob = build([_bytes(payload)])
        told = p.Publish(stream=stream, topic=topic, response=name, timeout=int(timeout * 1e6))

        def send(number: int) -> None:
            told.request = number
            self.send(told, [blob])

        answer, data = await self._ask(send, timeout + 5.0)
        if answer.code:
            raise NoAnswerError(answer.code, f"no answer from {stream!r}")
        return Records(data).payload(0)

    async def respond(self, response: str, payload: Payload) -> None:
        """Answer a request, by the name of its response stream."""
        blob = build([_bytes(payload)])
        await self.ask(lambda n: self.send(p.Respond(request=n, response=response), [blob]))

    # ------------------------------------------------------------ consuming

    async def subscribe(
        self,
        stream: str,
        *,
        group: str = "",
        exclusive: bool = False,
        start: Start | int = "start",
        prefetch: int = PREFETCH,
        matcher: str | None = None,
        ack_wait: float = 0.0,
        timeout: float | None = None,
    ) -> Subscription:
        """Messages of a stream, as an async iterator; with a group, shared with its other members."""
        made = Subscription(
            self,
            next(self._channels),
            stream,
            group=group,
            exclusive=exclusive,
            start=start,
            prefetch=prefetch,
            matcher=matcher,
            ack_wait=ack_wait,
        )

        def send(number: int) -> None:
            self._subscriptions[made.channel] = made  # not before: a reconnect would make it too
            self.send(made.request(number), (), made.channel)

        try:
            await self.ask(send, timeout)
        except BaseException:
            self._subscriptions.pop(made.channel, None)
            raise
        return made

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; its messages go to others."""
        if self._connection is not None and not self._closing:
            with contextlib.suppress(StreamsError):
                await self.ask(
                    lambda n: self.send(p.Unsubscribe(request=n), (), subscription.channel)
                )
        self._subscriptions.pop(subscription.channel, None)

    # ------------------------------------------------------------ streams

    async def admin(self, call: str, timeout: float | None = None, **arguments: Any) -> Any:
        """Ask the node to do something with its streams."""
        told = json.dumps(arguments)
        answer = await self.ask(
            lambda n: self.send(p.Admin(request=n, call=call, arguments=told)), timeout
        )
        return json.loads(answer.result)

    async def ensure(self, stream: str, mode: str = "warn", **settings: Any) -> dict[str, Any]:
        """Make a stream what it is asked to be: what was done, and what differs."""
        return dict(await self.admin("ensure", name=stream, asked=settings, mode=mode))

    async def streams(self) -> list[dict[str, Any]]:
        """All streams, with their groups."""
        return list(await self.admin("list"))

    async def describe(self, stream: str) -> dict[str, Any]:
        """What there is to know of a stream."""
        return dict(await self.admin("describe", name=stream))

    async def delete(self, stream: str, *, dead_letters: bool = False) -> list[str]:
        """Delete a stream with all that is in it, and its dead letters if asked to: the names that are gone."""
        told = await self.admin("delete", name=stream, dead_letters=dead_letters)
        return list(told["deleted"])

    async def purge(self, stream: str, before: int | None = None) -> dict[str, int]:
        """Take all messages out of a stream, or those before an offset: `first`, `end`, and how many (`purged`)."""
        return dict(await self.admin("purge", name=stream, before=before))

    async def redrive(
        self,
        stream: str,
        offsets: Sequence[int] | None = None,
        most: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, int]:
        """Publish the dead letters of a stream to it again: how many were `redriven`, `already`, and are `left`."""
        chosen = None if offsets is None else list(offsets)
        return dict(await self.admin("redrive", timeout, name=stream, offsets=chosen, most=most))

    async def groups(self, stream: str) -> list[dict[str, Any]]:
        """The groups of a stream."""
        return list(await self.admin("groups", name=stream))

    async def group(self, stream: str, group: str) -> dict[str, Any]:
        """What a group does, and why it gets nothing."""
        return dict(await self.admin("group", name=stream, group=group))

    async def reset_group(self, stream: str, group: str, to: Start | int) -> int:
        """Let a group without members begin anew; its position."""
        told = await self.admin("reset_group", name=stream, group=group, to=to)
        return int(told["position"])

    async def delete_group(self, stream: str, group: str) -> None:
        """Forget a group without members, and its position."""
        await self.admin("delete_group", name=stream, group=group)


def _bytes(given: Payload) -> bytes:
    return given.encode() if isinstance(given, str) else given


def _fail(batch: _Batch, error: Exception) -> None:
    for future, _ in batch.futures:
        if not future.done():
            future.set_exception(error)
            future.exception()  # who does not wait for it need not hear of it


def _refusal(refused: p.Refused, id: bytes | None) -> StreamsError:
    if refused.code == "DUPLICATE_ID":
        return DuplicateIdError(
            f"the ID {id!r} is taken by offset {refused.offset}", refused.offset
        )
    return StreamsError(refused.code, f"the ID {id!r} cannot be remembered")


async def connect(
    where: str | None = None,
    *,
    secret: bytes | str | None = None,
    data: str | Path = "railgun-data",
    name: str = "",
    timeout: float = TIMEOUT,
    tls: ssl.SSLContext | None = None,
) -> Client:
    """A client of the node at `where` ("host:port"); without, of the one that works in the directory `data`."""
    home = Path(data)
    host, port = "", 0
    if where is None:
        try:
            found = json.loads((home / "node.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise NoNodeError(
                f"no node works in {home}: start one (railgun serve), or say where it is"
            ) from error
        host, port = found["host"], found["port"]
        if tls is None and found.get("certificate"):
            tls = ssl.create_default_context(cafile=found["certificate"])
    else:
        host, _, told = where.rpartition(":")
        if not told.isdigit():
            raise NoNodeError(f"{where!r} is no address: host:port")
        port = int(told)
    if secret is None:
        try:
            secret = (home / "secret").read_text("ascii").strip()
        except OSError as error:
            raise NoNodeError(f"the node's secret is not in {home}: give it") from error
    known = bytes.fromhex(secret) if isinstance(secret, str) else secret
    client = Client(host or "127.0.0.1", port, known, name=name, timeout=timeout, tls=tls)
    await client.open()
    return client
