"""A client: one connection to a node of several, for everything.

Rules:

1. `publish` returns when the message is on disk, as safe as it was asked for (`acks`). Messages of many tasks travel
   together: those that come up in one turn of the event loop, and those that come up while as many publishes of the
   stream as may be are under way.
2. Every call has a deadline. If it passes, what was asked for may have been done or not.
3. A connection that is lost is made again, with growing pauses, and subscriptions with it. Requests that were never
   written to it are sent by the next one, until their deadline. Publishes that were written and not answered are sent
   again if all their messages have IDs: then they cannot come twice, and a duplicate is what was wanted. So are calls
   that do no harm when they are done twice (`IDEMPOTENT`). Others raise `CONNECTION_LOST`: they may have been done or
   not, and only the caller knows whether twice does harm.
   An event loop that was busy for `STALL_S` does not know whether the node has given the connection up meanwhile: the
   client pings, and sends nothing else before the node has answered or another connection is made.
   A node that is about to end says so (`GoingAway`): nothing more is sent to it, what it has taken it answers, and what
   it has not (`STOPPING`) goes to the next node, or to this one when it is back, until the deadline.
4. A connection that does not answer pings is dead (`transport.heartbeat`): after `SILENCE_S` seconds, or after
   `SILENCE_WITH_OTHERS_S` if there are other nodes to go to. A node that does not answer the hello is left as soon.
5. A node tells of the others of its cluster. When a connection is lost the others are tried at once, in turn.
6. `NO_MASTER` means that nothing was done: it is tried again until the deadline, whatever it is, and what is published
   to that stream meanwhile waits behind it. `DEPOSED` means what a lost connection means.
7. When a node says that it has no quorum (`no_quorum`), all others that are known are knocked at, at the same time,
   but for those that have said so themselves within `NO_QUORUM_S`. The client leaves for the first that answers. If
   none does within `SEEK_S`, or if there are none, the request fails at once with `NO_MASTER`; the connection stays,
   with what is subscribed. If one answers later, the client leaves for it then, for the sake of what comes next.
   With `wait_for_quorum` requests do not fail then: they are tried again until their deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from google.protobuf.message import Message as Command

from railgun.client.address import DATA, Address
from railgun.client.checks import (
    LEFT_OUT,
    MAX_DELAY_S,
    MAX_PREFETCH,
    MAX_REQUEST_S,
    BadValueError,
    as_bytes,
    check_flag,
    check_headers,
    check_id,
    check_list,
    check_optional,
    check_seconds,
    check_start,
    check_text,
    check_whole,
)
from railgun.client.errors import DeadlineError, NoAnswerError, NoNodeError, StreamsError
from railgun.client.nodes import Nodes, Pauses, Where
from railgun.client.producer import TRANSACTION_S, Producer, Transaction, begin
from railgun.client.publisher import SOON, Acks, Publisher, level, tell
from railgun.client.subscription import TRACKED, Start, Subscription
from railgun.errors import said
from railgun.transport.commands import VERSION, Blob, Frame, FrameError, FrameReader, encode
from railgun.transport.connection import Connection
from railgun.transport.error_codes import resent
from railgun.transport.heartbeat import Beat, Heartbeat
from railgun.transport.hello import BAD_SECRET, BAD_VERSION, HelloError
from railgun.transport.outbox import Outbox
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import Records, build

TIMEOUT: Final = 30.0
LATE: Final = "not published before its timeout: it may be stored or not. With an ID it can be published again"
SILENCE_S: Final = 20.0
SILENCE_WITH_OTHERS_S: Final = 2.0
AGAIN: Final = (0.05, 2.0)  # seconds to the next try: at first, and at most
STALL_S: Final = 1.0  # for which the event loop was busy, so that the connection may be gone
IDEMPOTENT: Final = frozenset(
    {"describe", "list", "groups", "group", "finished", "nodes", "cluster", "ensure"}
    | {"producers", "begin_producer", "open_sequence", "commit_sequences", "forget_producer"}
    | {"drop_sequences"}
)
"""Calls that are sent again when their connection is lost: they only read, or do nothing the second time."""
TICK_S: Final = 0.4  # between two looks at the heartbeat: others may have become known
NO_QUORUM_S: Final = 10.0  # until the others are sought again for a node that had no quorum
SEEK_S: Final = (
    0.5  # for another node to answer, while requests wait that one without a quorum has refused
)
DIAL_S: Final = (
    2.0,
    10.0,
)  # for one node, if there are others: at first, and when all were tried in vain
LASTING: Final = 0.5  # seconds after which a connection was of use
PREFETCH: Final = 1000
SWEEP: Final = 0.1  # seconds between two looks for deadlines that have passed
Payload = bytes | str
ANSWER_GRACE_S: Final = 5.0
"""How much longer than a request's timeout a client waits to be told of it."""
LOST: Final = frozenset({"CONNECTION_LOST", "CLOSED", "NO_SUBSCRIPTION"})
"""What a request is told whose connection is lost, or about to be."""
_NOBODY: Final = (None, 0.0, 0)


class _NotSentError(StreamsError):
    """A request was not written before its connection was lost: nothing was done, and it may be sent again."""

    def __init__(self, lost: StreamsError) -> None:
        super().__init__(lost.code, lost.text)


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
        socket: str | None = None,
        others: Sequence[Where] = (),
        wait_for_quorum: bool = False,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.timeout = timeout
        self._waits_for_quorum = check_flag("wait_for_quorum", wait_for_quorum)
        self._nodes = Nodes([(host, port), *others])
        self._secret, self._name, self._tls = secret, name, tls
        self._socket = ((host, port), socket)  # for whom, if it is on this machine
        self._learning: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._reader = FrameReader()
        self._open = asyncio.Event()
        self._closing = False
        self._going = False  # whether the node is about to end
        self._awake_s = 0.0  # when the event loop was known to turn
        self._verifying = (
            0  # the number of the ping that tells whether the connection is alive; 0: it is
        )
        self._running: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[None] | None = None
        self._heartbeat = Heartbeat(SILENCE_S, 0.0)  # of each connection its own
        self._token = secrets.token_hex(12)  # names of responses are unique in the world
        self._numbers = itertools.count(1)
        self._channels = itertools.count(1)
        self._answers: dict[int, tuple[asyncio.Future[Any], float, int]] = {}
        """By the numbers of requests: who waits, until when, and the last frame of the request."""
        self._subscriptions: dict[int, Subscription] = {}
        # Channels of subscriptions that are made again, and whether that has to be done once more.
        self._renewing: dict[int, bool] = {}
        self._outbox: Outbox | None = None
        self._publisher = Publisher(self, self._numbers)
        self._producers: dict[str, Producer] = {}  # of transactions, by their streams
        self._sweeping: asyncio.TimerHandle | None = None
        self._last_error = ""
        self._without_quorum: dict[Where, float] = {}  # nodes that had none, and when they said so
        self._seeking: asyncio.Task[None] | None = None  # for a node that has one
        self._on_hold = False  # whether requests wait for what it finds

    # ------------------------------------------------------------ the connection

    async def open(self) -> None:
        """Connect; raises if it cannot be done within the timeout."""
        self._running = self.loop.create_task(self._run())
        self._sweep()
        opened = self.loop.create_task(self._open.wait())
        await asyncio.wait(
            [opened, self._running], timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED
        )
        opened.cancel()
        if self._running.done() or not self._open.is_set():
            await self.close()
            raise NoNodeError(f"no node at {self._nodes}: {self._last_error or 'no answer'}")

    @property
    def where(self) -> Where:
        """The node it is connected to, or tries to be."""
        return self._nodes.current

    async def _run(self) -> None:
        pauses, dials, first, hopeless = Pauses(*AGAIN), Pauses(*DIAL_S), True, True
        dial_s = dials.next()
        while not self._closing:
            began = math.inf
            try:
                async with asyncio.timeout(dial_s if len(self._nodes) > 1 else None):
                    await self._connect()
                began, first = self.loop.time(), False
                pauses.reset()
                dials.reset()
                await self._alive()
            except (OSError, StreamsError, FrameError) as error:
                self._last_error = getattr(error, "text", said(error)) or "no answer"
                hopeless &= getattr(error, "code", "") in (BAD_SECRET, BAD_VERSION)
            self._disconnected()
            if not self._closing and self._nodes.turn(self.loop.time() - began > LASTING):
                if first and hopeless:
                    return  # it will not become right by trying
                hopeless = True
                dial_s = dials.next()
                await asyncio.sleep(pauses.next())

    async def _connect(self) -> None:
        self._reader = FrameReader()
        opened: asyncio.Future[None] = self.loop.create_future()
        lost: asyncio.Future[None] = self.loop.create_future()

        def made(connection: Connection) -> None:
            connection.filling = self._reader
            if not opened.done():
                opened.set_result(None)

        def gone(connection: Connection, error: Exception | None) -> None:
            code = error.code if isinstance(error, HelloError) else "CONNECTION_LOST"
            told = StreamsError(code, said(error) if error else "the node closed the connection")
            for future in (opened, lost):
                if not future.done():
                    future.set_exception(told)
            lost.exception()
            if not opened.cancelled():
                opened.exception()

        who = {"version": VERSION, "name": self._name}
        connection = await self._dial(
            self.where, lambda: Connection(self._secret, made, self._received, gone, who)
        )
        try:
            await opened
        except BaseException:  # also if nobody wants it any more
            connection.transport.abort()
            raise
        self._connection, self._lost = connection, lost
        self._going = False
        self._verifying, self._awake_s = 0, self.loop.time()
        self._outbox = Outbox(self.loop, connection.transport)
        self._heartbeat = Heartbeat(SILENCE_S, self.loop.time())
        await self._resume()
        self._open.set()
        if self._learning is not None:
            self._learning.cancel()
        self._learning = self.loop.create_task(self._learn())

    async def _learn(self) -> None:
        """Ask where the other nodes are; one that is alone, or does not know, says so."""
        with contextlib.suppress(StreamsError, ValueError):
            answer = await self.ask(lambda n: self.send(p.Admin(request=n, call="nodes")))
            self._nodes.learn(json.loads(answer.result))

    async def _dial(self, where: Where, protocol: Callable[[], Connection]) -> Connection:
        """By the socket in the node's directory, if it is on this machine; else by TCP."""
        local, path = self._socket
        if path is not None and local == where and os.path.exists(path):
            with contextlib.suppress(OSError):
                return (await self.loop.create_unix_connection(protocol, path))[1]
        return (await self.loop.create_connection(protocol, *where, ssl=self._tls))[1]

    async def _resume(self) -> None:
        """Make the subscriptions again, and send what can be sent again."""
        for subscription in list(self._subscriptions.values()):
            self.loop.create_task(self._again(subscription))
        self._publisher.resume()

    async def _again(self, subscription: Subscription) -> None:
        """Make a subscription again, until it is there; the next connection does it anew by itself."""
        here, channel, pauses = self._connection, subscription.channel, Pauses(*SOON)
        self._renewing[channel] = False
        while self._connection is here and not subscription.over:
            try:
                await self._ask(
                    lambda n: self.send(subscription.request(n), (), channel), None, once=True
                )
                if self._connection is not here or not self._renewing.get(channel):
                    break
                self._renewing[channel] = False  # it was there, and was lost before this task ran
                self.send(p.Unsubscribe(), (), channel)
                continue
            except StreamsError as error:
                if not resent(error.code):
                    if not error.may_pass and error.code != "NO_SUBSCRIPTION":
                        subscription.failed(error)
                        break
                    if self._connection is not here or error.code in LOST:
                        break
                    self.send(p.Unsubscribe(), (), channel)  # it may be made yet
                subscription.trouble = str(error)
            await asyncio.sleep(pauses.next())
        if self._connection is here:
            self._renewing.pop(channel, None)

    def renew(self, subscription: Subscription) -> None:
        """Its master is none any more: make it again, as soon as there is another one."""
        channel = subscription.channel
        if channel in self._renewing:
            self._renewing[channel] = True
            return
        self._renewing[channel] = False
        self.send(p.Unsubscribe(), (), channel)
        self.loop.create_task(self._again(subscription))

    async def _alive(self) -> None:
        """Ping until the connection is lost; raises `CONNECTION_LOST` when the node does not answer."""
        assert self._lost is not None
        heartbeat, beat = self._heartbeat, Beat.NOTHING
        while beat is not Beat.DEAD:
            await asyncio.wait([self._lost], timeout=min(TICK_S, heartbeat.interval_s))
            self._notice_stall()
            heartbeat.silence_s = SILENCE_S if len(self._nodes) == 1 else SILENCE_WITH_OTHERS_S
            if self._lost.done():
                self._lost.result()
            beat = heartbeat.tick(self.loop.time())
            if beat is Beat.PING:
                self.send(p.Ping(number=1))
        assert self._connection is not None
        self._connection.transport.abort()
        raise StreamsError("CONNECTION_LOST", "the node says nothing")

    def _disconnected(self) -> None:
        self._open.clear()
        self._renewing.clear()
        self._going = False
        self._verifying = 0
        if self._seeking is not None:
            self._seeking.cancel()
        self._seeking, self._on_hold = None, False
        written = self._outbox.written if self._outbox is not None else 0
        self._connection = self._outbox = None
        told = StreamsError("CONNECTION_LOST", self._last_error)
        self._publisher.cut_off(told, written)
        answers, self._answers = self._answers, {}
        for future, _, frame in answers.values():
            tell(future, told if frame <= written else _NotSentError(told))
        for subscription in self._subscriptions.values():
            subscription.cut_off(told)

    async def close(self) -> None:
        """Say good-bye: what is under way is waited for, as long as a call may take."""
        if not self._closing:
            if self._learning is not None:
                self._learning.cancel()
            if self._open.is_set() or self._going or self._verifying or self._on_hold:
                pending = self._publisher.pending()
                if pending:
                    await asyncio.wait(pending, timeout=self.timeout)
                leaving = [self.loop.create_task(s.close()) for s in self._subscriptions.values()]
                if leaving:
                    await asyncio.wait(leaving, timeout=self.timeout)
                if self._outbox is not None:
                    self._outbox.flush()
            self._closing = True
            if self._sweeping is not None:
                self._sweeping.cancel()
            if self._connection is not None:
                self._connection.close()
            if self._running is not None:
                self._running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._running
            self._disconnected()
            self._publisher.close()
            self._open.set()  # who waits for it is told
            for subscription in self._subscriptions.values():
                subscription.ended()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # ------------------------------------------------------------ frames

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._outbox is not None

    def may_send(self) -> bool:
        """Return whether there is a connection to a node that takes requests; look first whether it is still there."""
        if self._connection is None or self._outbox is None or self._going:
            return False
        if self._connection.transport.is_closing():  # it is lost, and made again soon
            self._open.clear()
            return False
        self._notice_stall()
        return not self._verifying and not self._on_hold

    def _notice_stall(self) -> None:
        """Ask the node whether the connection is alive if the event loop was busy for long; send nothing before."""
        now_s = self.loop.time()
        stalled, self._awake_s = now_s - self._awake_s > STALL_S, now_s
        if stalled and self._outbox is not None and not self._going and not self._verifying:
            self._verifying = next(self._numbers)
            self._open.clear()
            self.send(p.Ping(number=self._verifying))

    def _verified(self) -> None:
        """The node has answered: send what waits."""
        self._verifying = 0
        self._go_on()

    def _go_on(self) -> None:
        """Send what waits, unless something else stands against it."""
        if not self._going and not self._verifying and not self._on_hold:
            self._open.set()
            self._publisher.go_on()

    @property
    def closing(self) -> bool:
        """Whether it takes nothing more."""
        return self._closing

    @property
    def trouble(self) -> str:
        """Why requests are not answered now, for people; empty: nothing stands against them."""
        if self.connected:
            return self._publisher.trouble
        return f"no node at {self._nodes}: {self._last_error or 'no answer'}"

    def send(self, command: Command, blobs: Sequence[Blob] = (), channel: int = 0) -> None:
        """Send a frame, with the others of this turn; nothing, if there is no connection."""
        if self._outbox is not None:
            self._outbox.send(encode(command, blobs, channel))

    @property
    def frames(self) -> int:
        """How many frames were sent by this connection: the number of the last one."""
        return 0 if self._outbox is None else self._outbox.frames

    def _received(self, connection: Connection, data: bytes) -> None:
        self._notice_stall()
        self._heartbeat.heard_s = self.loop.time()
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
            if self._going:
                self._leave()
        except (FrameError, ValueError) as error:
            connection.close(error)

    def _take(self, frame: Frame) -> None:
        command, channel = frame.command, frame.channel
        match command:
            case p.Deliver():
                subscription = self._subscriptions.get(channel)
                if subscription is not None:
                    subscription.delivered(command, frame.blob)
            case p.Published() | p.Failed() if self._publisher.answered(command):
                pass
            case p.Subscribed():
                # Now, and not when who waits for it comes to run: messages may be right behind.
                if channel in self._subscriptions:
                    self._subscriptions[channel].began(command)
                if channel in self._renewing:
                    self._renewing[channel] = False  # what was lost before is there again
                future, *_ = self._answers.pop(command.request, _NOBODY)
                if future is not None and not future.done():
                    future.set_result((command, frame.blob))
            case p.Missed() | p.Lost() | p.Recalled():
                self._tell(channel, command)
            case p.Ping():
                self.send(p.Pong(number=command.number))
            case p.Pong() if command.number == self._verifying:
                if self._verifying:
                    self._verified()
            case p.GoingAway():
                self._go("the node has ended in order")
                self.send(p.Pong(number=command.number))
            case _:
                future, *_ = self._answers.pop(getattr(command, "request", 0), _NOBODY)
                if future is None:
                    self._tell(channel, command)
                elif isinstance(command, p.Failed):
                    if not future.done():
                        future.set_exception(
                            StreamsError(command.code, command.text, command.no_quorum)
                        )
                elif not future.done():
                    future.set_result((command, frame.blob))

    def _go(self, why: str) -> None:
        """Send nothing more to this node, and go to another one when the node has answered what is under way."""
        self._open.clear()
        self._going = True
        self._last_error = why

    def _leave(self) -> None:
        """Go to another node, if this one is to be left and nothing is under way to it."""
        if self._connection is not None and not self._answers and not self._publisher.awaits:
            assert self._outbox is not None
            for subscription in self._subscriptions.values():
                subscription.send_acks()
            self._outbox.flush()
            self._connection.close()

    def tries_again(self, error: StreamsError, *, idempotent: bool) -> bool:
        """Return whether a request that failed so is sent again, until its deadline.

        It is if the cause is a change of nodes or roles, and nothing was done or the request is `idempotent` (does no
        harm when it is done twice). An idempotent one is sent again also when the connection was lost.
        """
        if self._closing:
            return False
        if error.code in ("CONNECTION_LOST", "CLOSED"):
            return idempotent
        if not resent(error.code) or not (error.nothing_done or idempotent):
            return False
        return not self._gives_up(error)

    def _gives_up(self, error: StreamsError) -> bool:
        """Return whether a request that was refused for want of a quorum is not tried again: rule 7."""
        if not error.no_quorum:
            return False
        if self._going or self._on_hold:
            return False
        now_s = self.loop.time()
        recent = {w for w, said_s in self._without_quorum.items() if now_s - said_s < NO_QUORUM_S}
        others = [where for where in self._nodes if where not in {self.where, *recent}]
        if self.where not in recent:
            self._without_quorum[self.where] = now_s
        if self.where in recent or not others:
            return not self._waits_for_quorum
        self._on_hold = True
        self._open.clear()
        self._seeking = self.loop.create_task(self._seek(others, error.text))
        return False

    async def _seek(self, others: Sequence[Where], why: str) -> None:
        """Leave for the first of `others` that answers; until `SEEK_S`, requests wait for that."""
        knocking = [self.loop.create_task(self._knock(where)) for where in others]
        began_s = self.loop.time()
        try:
            found = await _first(knocking, began_s + SEEK_S)
            self._on_hold = False
            if found is None:
                self._go_on()
                found = await _first(knocking, began_s + DIAL_S[0])
        finally:
            for task in knocking:
                task.cancel()
        self._seeking = None
        if found is not None and not self._going:
            self._nodes.prefer(found)
            self._go(why)
            self._leave()

    async def _knock(self, where: Where) -> Where | None:
        """Return `where` when the node there has answered the hello; None: it does not let us in, or is not there."""
        answered: asyncio.Future[bool] = self.loop.create_future()

        def tell(is_there: bool) -> None:
            if not answered.done():
                answered.set_result(is_there)

        who = {"version": VERSION, "name": self._name}
        connection: Connection | None = None
        try:
            connection = await self._dial(
                where,
                lambda: Connection(
                    self._secret,
                    lambda _: tell(True),
                    lambda *_: None,
                    lambda *_: tell(False),
                    who,
                ),
            )
            return where if await answered else None
        except (OSError, UnicodeError):
            return None
        finally:
            if connection is not None:
                connection.abort()

    def _tell(self, channel: int, command: Any) -> None:
        subscription = self._subscriptions.get(channel)
        if subscription is not None:
            subscription.told(command)

    async def ask(self, send: Callable[[int], object], timeout: float | None = None) -> Any:
        """Send something with a number, and wait for the command that answers it."""
        return (await self._ask(send, timeout))[0]

    async def _ask(
        self, send: Callable[[int], object], timeout: float | None, *, once: bool = False
    ) -> Any:
        """As `ask`, with what came beside the command. `once`: raise also what nothing was done of."""
        deadline = self.loop.time() + (self.timeout if timeout is None else timeout)
        while True:
            try:
                return await self._ask_once(send, deadline)
            except _NotSentError:
                if once or self._closing:
                    raise
            except StreamsError as error:
                if error.code != "STOPPING" or self._closing:
                    raise
            await asyncio.sleep(SOON[0])  # nothing was done, and another node will be asked

    async def _ask_once(self, send: Callable[[int], object], deadline: float) -> Any:
        number = next(self._numbers)
        future: asyncio.Future[Any] = self.loop.create_future()
        try:
            while not self.may_send() and not self._closing:
                reached_by = self._deadline(None) if deadline == math.inf else deadline
                async with asyncio.timeout_at(reached_by):
                    await self._open.wait()
            if self._closing:
                raise StreamsError("CLOSED", "the client is closed")
            send(number)
            self._answers[number] = (future, deadline, self.frames)
            return await future
        except TimeoutError as error:
            raise DeadlineError(self._late(number)) from error
        finally:
            self._answers.pop(number, None)

    # ------------------------------------------------------------ deadlines

    def _late(self, number: int) -> str:
        """Return what to say of a request that was not answered before its timeout."""
        if number not in self._answers:
            why = self.trouble or "the node takes nothing now"
            return f"nothing was sent before the timeout of this call: {why}. See to the node, and try again"
        return (
            "the node has not answered before the timeout of this call, and may have done what was asked or not: look, "
            "or ask again with a longer timeout"
        )

    def _deadline(self, timeout: float | None) -> float:
        """Return when a call with this timeout is over, by the clock of the event loop."""
        seconds = self.timeout if timeout is None else check_seconds("timeout", timeout)
        return self.loop.time() + seconds

    def _sweep(self) -> None:
        """Tell those whose deadline has passed. A look now and then is cheaper than a timer for each call."""
        now = self.loop.time()
        self._sweeping = self.loop.call_later(SWEEP, self._sweep)
        late = [future for future, deadline, _ in self._answers.values() if deadline < now]
        for future in late:
            tell(future, TimeoutError())
        for future, error in self._publisher.late(now):
            tell(future, error)

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
        acks: Acks = "quorum",
    ) -> int:
        """Publish a message; its offset, when it is on disk (of an ephemeral stream: how many matched).

        `acks`: on the disks of a `quorum` of replicas, of the `master`, or of `all` of them. With `none` it returns -1
        when the message was sent: it may be lost, and nobody hears of it. Raises `DuplicateIdError` if the `id` is
        taken; not if the connection was lost meanwhile, and the message sent again: then it is the offset of the ID.
        """
        check_text("stream", stream)
        check_text("topic", topic)
        given, deadline, safety = as_bytes("payload", payload), self._deadline(timeout), level(acks)
        if id is None and headers is None:
            future = self._publisher.put_one(stream, topic, given, deadline, safety)
        else:
            ids: list[bytes | None] | None = None if id is None else [check_id(id)]
            told = None if headers is None else [check_headers(headers)]
            future = self._publisher.put(stream, topic, [given], ids, told, deadline, safety)
        try:
            return int((await future)[0])
        except TimeoutError as error:
            raise DeadlineError(LATE) from error

    async def publish_many(
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
        """Publish messages in this order; the offset of each. `acks`: as of `publish`.

        With one `id` for all, they are stored wholly or not at all, and a second time not at all. `atomic`: they are
        seen all together or not at all, however many there are, and stored once, whatever fails meanwhile.
        """
        safety = level(acks)
        if atomic:
            if safety != level("quorum"):
                raise StreamsError(
                    "BAD_REQUEST",
                    "what is published atomically is on a quorum of disks: leave acks out",
                )
            return await self._publish_atomically(stream, payloads, ids or id or topic, timeout)
        check_text("stream", stream)
        check_text("topic", topic)
        payloads = check_list("payloads", payloads)
        if not len(payloads):
            return []
        if id is not None:
            if ids is not None or topic:
                raise StreamsError("BAD_REQUEST", "one ID for all, or one for each; and no topic")
            given = _all_bytes(payloads)
            deadline = self._deadline(timeout)
            future = self._publisher.put_together(stream, given, check_id(id), deadline, safety)
            return list(await _published(future))
        ids = check_list("ids", ids) if ids is not None else None
        if ids is not None and len(ids) != len(payloads):
            raise StreamsError("BAD_REQUEST", f"{len(ids)} IDs for {len(payloads)} messages")
        known = [None if one is None else check_id(one) for one in ids] if ids else None
        given, deadline = _all_bytes(payloads), self._deadline(timeout)
        futures = self._publisher.put_many(stream, topic, given, known, deadline, safety)
        every = await _published(asyncio.gather(*futures))
        return list(itertools.chain.from_iterable(every))

    async def _publish_atomically(
        self, stream: str, payloads: Sequence[Payload], more: object, timeout: float | None
    ) -> list[int]:
        if more:
            raise StreamsError(
                "BAD_REQUEST", "what is published atomically has no IDs and no topic"
            )
        given = _all_bytes(check_list("payloads", payloads))
        if not given:
            return []
        try:
            async with (
                asyncio.timeout_at(self._deadline(timeout)),
                self.transaction(stream) as together,
            ):
                await together.put_all(given)
        except TimeoutError as error:
            raise DeadlineError(LATE) from error
        return list(together.offsets)

    @contextlib.asynccontextmanager
    async def transaction(self, stream: str) -> AsyncIterator[Transaction]:
        """Publish messages that are seen all together, or not at all.

        What is put into the transaction is committed when the block ends, and dropped if it raises. Raises
        `StreamsError`; with the codes `DEADLINE` and `CONNECTION_LOST` at its end it may be committed or not.
        """
        check_text("stream", stream)

        async def begin(again: bool) -> Producer:
            if again or stream not in self._producers:
                name = f"client/{self._token}"
                self._producers[stream] = await self.producer(
                    stream, name, 0, lifetime=TRANSACTION_S
                )
            return self._producers[stream]

        async def check() -> None:
            described = await self.admin("describe", name=stream)
            if described["settings"]["kind"] != "persistent":
                raise StreamsError(
                    "NOT_PERSISTENT",
                    f"stream {stream!r} is ephemeral: nothing can be staged for it",
                )

        transaction = Transaction(begin, check)
        try:
            yield transaction
            await transaction.commit()
        except BaseException:
            await transaction.abandon()
            raise

    async def producer(
        self,
        stream: str,
        name: str,
        epoch: int | None = None,
        *,
        keep: Iterable[int] | None = None,
        lifetime: float | None = None,
        session: str | None = None,
    ) -> Producer:
        """Begin an epoch of a producer, which stages messages and commits them exactly once (`client.producer`).

        `keep`: drop what earlier epochs have staged, but for these sequences; None: drop nothing. `lifetime`: it is
        forgotten when it is not used for so long (seconds); None: never. `session`: in place of an epoch, a name that
        nobody else has; a new one is given the next epoch, and what was staged before is dropped. Raises `StreamsError`
        with the code `FENCED` if a later epoch has begun.
        """
        return await begin(self, stream, name, epoch, keep, lifetime, session)

    def put_staged(
        self,
        stream: str,
        payloads: list[bytes],
        staging: p.Staging,
        wanted: Callable[[], bool] | None = None,
    ) -> asyncio.Future[Any]:
        """Stage messages of a producer (`Stage.put_soon`), until they are safe or refused.

        `wanted`: whether they are to be sent when nobody waits for them any more.
        """
        return self._publisher.put_staged(stream, payloads, staging, math.inf, wanted)

    # ------------------------------------------------------------ requests

    async def request(
        self,
        stream: str,
        payload: Payload,
        *,
        topic: str = "",
        timeout: float | None = None,
    ) -> bytes:
        """Send a request to the listeners of an ephemeral stream, and return the first answer.

        `timeout`: how long the node waits for an answer (seconds); None: as long as the node or its cluster is
        configured to (`rs_timeout`). Raises `NoAnswerError` when the node says that nobody listens or nobody has
        answered in time, and `CONNECTION_LOST` when the node is gone.
        """
        check_text("stream", stream)
        check_text("topic", topic)
        if timeout is not None:
            check_seconds("timeout", timeout, 1e-6, MAX_REQUEST_S)
        name = f"r{self._token}-{next(self._numbers)}"
        blob = build([as_bytes("payload", payload)])
        told = p.Publish(stream=stream, topic=topic, response=name)
        if timeout is not None:
            told.timeout = max(1, int(timeout * 1e6))  # 0 stands for the configured one

        def send(number: int) -> None:
            told.request = number
            self.send(told, [blob])

        # The node keeps the time. A node that is gone is noticed by its silence, and this call is told then.
        patience = math.inf if timeout is None else timeout + ANSWER_GRACE_S
        answer, data = await self._ask(send, patience)
        if answer.code:
            raise NoAnswerError(answer.code, f"no answer from {stream!r}")
        return Records(data).payload(0)

    async def respond(self, response: str, payload: Payload, *, confirm: bool = True) -> None:
        """Answer a request, by the name of its response stream.

        `RS_GONE` if nobody waits for it any more; without `confirm` it does not wait to hear of that.
        """
        check_text("response", response)
        blob = build([as_bytes("payload", payload)])
        if confirm:
            await self.ask(lambda n: self.send(p.Respond(request=n, response=response), [blob]))
        else:
            self.send(p.Respond(response=response), [blob])

    # ------------------------------------------------------------ consuming

    async def subscribe(
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
    ) -> Subscription:
        """Subscribe to a stream; return its messages as an async iterator.

        `group`: share them with the other members of that group. `consumer`: the ID of a single consumer whose
        position the node keeps; its messages are acked, and come in order. Who subscribes with an ID that is in use
        takes over, and the other one ends with `CONSUMER_TAKEN`. `start` is ignored once a group or a consumer has a
        position, unless it is an offset. `identity`: of the stream that `start` is an offset of
        (`Subscription.identity`). If that stream was deleted and made anew, `STREAM_REPLACED` is raised.
        """
        check_text("stream", stream)
        group = check_optional("group", group)
        consumer = check_optional("consumer", consumer)
        if group.startswith(TRACKED):
            raise BadValueError(
                f"the group {group!r}: names that begin with {TRACKED!r} are reserved for tracked consumers. Choose "
                f"another name, or subscribe as the consumer {group.removeprefix(TRACKED)!r} (consumer=…, "
                "railgun sub --consumer)"
            )
        check_text("identity", identity)
        check_flag("exclusive", exclusive)
        check_start(start)
        check_whole("prefetch", prefetch, 1, MAX_PREFETCH)
        check_seconds("ack_wait", ack_wait, 0.0, MAX_DELAY_S)
        if matcher is not None:
            check_text("matcher", matcher)
        if consumer:
            if group:
                raise StreamsError(
                    "BAD_REQUEST",
                    "a subscription is of a group or of a tracked consumer, not of both",
                )
            group, exclusive = TRACKED + consumer, True
        if exclusive and not group:
            raise BadValueError("exclusive is for the members of a group: name one")
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
            identity=identity,
        )

        def send(number: int) -> None:
            self._subscriptions[made.channel] = made  # not before: a reconnect would make it too
            self.send(made.request(number), (), made.channel)

        deadline, pauses = self._deadline(timeout), Pauses(*SOON)
        while True:
            try:
                await self._ask(send, deadline - self.loop.time(), once=True)
                return made
            except BaseException as error:
                if self._subscriptions.pop(made.channel, None) is not None:
                    self.send(p.Unsubscribe(), (), made.channel)  # the node may make it yet
                again = isinstance(error, StreamsError) and self.tries_again(error, idempotent=True)
                if not again or not await self._pause(pauses, deadline):
                    raise
                # nothing has come of it, and it is asked for again

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
        check_text("call", call)
        try:
            told = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadValueError(
                f"{call}: arguments are what JSON can say: {said(error)}"
            ) from error
        deadline, pauses = self._deadline(timeout), Pauses(*SOON)
        while True:
            try:
                answer = await self.ask(
                    lambda n: self.send(p.Admin(request=n, call=call, arguments=told)),
                    deadline - self.loop.time(),
                )
                return json.loads(answer.result)
            except StreamsError as error:
                again = self.tries_again(error, idempotent=call in IDEMPOTENT)
                if not again or not await self._pause(pauses, deadline):
                    raise

    async def _pause(self, pauses: Pauses, deadline: float) -> bool:
        """Wait before something is tried again; False: there is no time left for that."""
        pause = pauses.next()
        if self._closing or self.loop.time() + pause >= deadline:
            return False
        await asyncio.sleep(pause)
        return True

    async def ensure(self, stream: str, mode: str = "warn", **settings: Any) -> dict[str, Any]:
        """Make a stream what it is asked to be: what was done, and what differs.

        In a cluster `region` says where it is kept, for ever; `global` if it does not.
        """
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
        """Take all messages out of a stream, or those before an offset: `first`, `end`, and how many (`purged`).

        An offset within a committed transaction cuts it: its later messages stay.
        """
        return dict(await self.admin("purge", name=stream, before=before))

    async def redrive(
        self,
        stream: str,
        offsets: Sequence[int] | None = None,
        most: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Deliver dead letters again, each to the group that gave it up.

        `offsets`: of the letters, all of them without; `most`: not more than so many. Return how many were `redriven`,
        were so `already`, are `left`, and which were `refused` (offset, code, text): also those of `offsets` that are
        not there (`NO_LETTER`) or were redriven before (`REDRIVEN`).
        """
        chosen = None if offsets is None else list(check_list("offsets", offsets))
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


async def _first(tasks: Sequence[asyncio.Task[Where | None]], deadline: float) -> Where | None:
    """Return what the first of the tasks that finds something has found; None: none has by then."""
    loop = asyncio.get_running_loop()
    while True:
        for task in tasks:
            if task.done() and task.exception() is None and (found := task.result()) is not None:
                return found
        left, patience = [task for task in tasks if not task.done()], deadline - loop.time()
        if not left or patience <= 0:
            return None
        await asyncio.wait(left, timeout=patience, return_when=asyncio.FIRST_COMPLETED)


def _all_bytes(given: Sequence[Payload]) -> list[bytes]:
    if set(map(type, given)) == {bytes}:  # as it should be: there is nothing to be done for each
        return cast("list[bytes]", list(given))
    return [as_bytes("a payload", one) for one in given]


async def _published(future: asyncio.Future[Any]) -> Any:
    try:
        return await future
    except TimeoutError as error:
        raise DeadlineError(LATE) from error


async def connect(
    where: str | Sequence[str] | None = None,
    *,
    secret: bytes | str | None = None,
    data: str | Path = DATA,
    name: str = "",
    timeout: float = TIMEOUT,
    tls: ssl.SSLContext | None = None,
    wait_for_quorum: bool = False,
) -> Client:
    """A client of the node at `where` ("host:port"); without, of the one that works in the directory `data`.

    Several may be given, as a list or with commas between them: one of them is enough, the others will do as well.
    `wait_for_quorum`: what is refused because a majority of the nodes is lost is tried again until its deadline; else
    it fails at once.
    """
    check_text("name", name)
    check_seconds("timeout", timeout)
    find = partial(Address.find, where, secret=secret, data=data)
    address = await asyncio.to_thread(find)  # it reads files, and may knock at the node's port
    return await reach(
        address, name=name, timeout=timeout, tls=tls, wait_for_quorum=wait_for_quorum
    )


async def reach(
    address: Address,
    *,
    name: str = "",
    timeout: float = TIMEOUT,
    tls: ssl.SSLContext | None = None,
    wait_for_quorum: bool = False,
) -> Client:
    """A client of the node with this address."""
    client = Client(
        address.host,
        address.port,
        address.secret,
        name=name,
        timeout=timeout,
        tls=tls or address.tls(),
        socket=address.socket,
        others=address.others,
        wait_for_quorum=wait_for_quorum,
    )
    await client.open()
    return client
