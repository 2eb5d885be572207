"""The asyncio client: one connection, to any node of a cluster, carries all publishes, requests and subscriptions.

Rules:

1. `publish` returns when the message is on disk, as safely as `acks` demands. Messages of many tasks are sent together:
   those of one turn of the event loop, and those published while the most publishes of the stream are under way.
2. Every call has a deadline. If it passes, the node may have carried out the call or not.
3. The client replaces a lost connection, with growing pauses between tries, and subscribes again. Requests that were
   never written to the lost connection are sent by the next one, until their deadline. Publishes that were written and
   not answered are sent again if all their messages have IDs: then they cannot be stored twice, and the answer
   "duplicate" is a success. Idempotent calls (`IDEMPOTENT_CALLS`) are also sent again. Other calls raise
   `CONNECTION_LOST`: they may have been done or not, and only the caller knows whether doing them twice does harm.
   If the event loop was busy for `STALL_S`, the node may have given the connection up meanwhile: the client pings, and
   sends nothing else until the node answers or there is another connection.
   A node that is about to stop announces it (`GoingAway`). The client sends it nothing more. The node answers the
   requests it has accepted; those it refuses (`STOPPING`) go to the next node, or to this one when it is back, until
   their deadline.
4. A connection that does not answer pings is dead (`transport.heartbeat`): after `SILENCE_S` seconds, or after
   `SILENCE_WITH_OTHERS_S` if there are other nodes. A node that does not answer the hello is given up as soon.
5. A node announces the other nodes of its cluster. When a connection is lost, they are tried at once, in turn.
6. `NO_MASTER` means that nothing was done: any call is retried until its deadline, and later publishes to the stream
   wait behind it. `DEPOSED` is treated as a lost connection.
7. When a node reports that it has no quorum (`no_quorum`), the client probes all other known nodes at the same time,
   except those that have reported the same within `NO_QUORUM_S`. It switches to the first that answers. If none does
   within `SEEK_S`, or there are no others, the request fails at once with `NO_MASTER`; the connection and its
   subscriptions stay. If a node answers later, the client switches to it then, for the benefit of later requests.
   With `wait_for_quorum` such requests do not fail: they are retried until their deadline.
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
from railgun.client.publisher import RETRY_PAUSES_S, Acks, Publisher, acks_value, fail_future
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

TIMEOUT: Final = 30.0  # seconds for a call
LATE_TEXT: Final = "not published before its timeout: it may be stored or not. With an ID it can be published again"
SILENCE_S: Final = 20.0
SILENCE_WITH_OTHERS_S: Final = 2.0
RECONNECT_PAUSES_S: Final = (0.05, 2.0)  # before the next round of tries: at first, and at most
STALL_S: Final = 1.0  # after the event loop was busy for so long, the connection may be gone
IDEMPOTENT_CALLS: Final = frozenset(
    {"describe", "list", "groups", "group", "finished", "nodes", "cluster", "ensure"}
    | {"producers", "begin_producer", "open_sequence", "commit_sequences", "forget_producer"}
    | {"drop_sequences"}
)
"""Calls that are sent again when their connection is lost: they only read, or do nothing the second time."""
TICK_S: Final = (
    0.4  # between two checks of the heartbeat; other nodes may have become known meanwhile
)
NO_QUORUM_S: Final = 10.0  # a node that reported no quorum is not probed again for so long
SEEK_S: Final = 0.5  # for another node to answer, while requests refused for want of a quorum wait
DIAL_TIMEOUTS_S: Final = (2.0, 10.0)
"""Timeout to connect to one of several nodes: at first, and at most. It grows when all were tried in vain."""
LASTING_S: Final = 0.5  # a connection of at least this duration counts as a success
PREFETCH: Final = 1000  # messages
SWEEP_INTERVAL_S: Final = 0.1  # between two checks for deadlines that have passed
Payload = bytes | str
ANSWER_GRACE_S: Final = 5.0
"""How much longer than a request's timeout a client waits for the node to report the timeout."""
LOST_CODES: Final = frozenset({"CONNECTION_LOST", "CLOSED", "NO_SUBSCRIPTION"})
"""Codes of requests whose connection is lost or about to be."""
_NO_WAITER: Final = (None, 0.0, 0)


class _NotSentError(StreamsError):
    """A request was not written before its connection was lost: nothing was done, and it can be sent again."""

    def __init__(self, lost: StreamsError) -> None:
        super().__init__(lost.code, lost.text)


class Client:
    """A connection to a node of the broker. `connect` returns it; `async with` closes it."""

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
        self._socket = ((host, port), socket)  # the node with a local socket, and its path
        self._learning: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._reader = FrameReader()
        self._open = asyncio.Event()
        self._closing = False
        self._going = False  # whether the client is about to leave this node
        self._awake_s = 0.0  # when the event loop last ran code of this client
        self._verifying = 0  # number of the ping that checks the connection after a stall; 0: none
        self._running: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[None] | None = None
        self._heartbeat = Heartbeat(SILENCE_S, 0.0)  # a new one for each connection
        self._token = secrets.token_hex(12)  # makes names of response streams globally unique
        self._numbers = itertools.count(1)
        self._channels = itertools.count(1)
        self._answers: dict[int, tuple[asyncio.Future[Any], float, int]] = {}
        """By request number: the future that waits, its deadline, and the last frame of the request."""
        self._subscriptions: dict[int, Subscription] = {}
        # Channels that are being subscribed again, and whether they must be subscribed once more after that.
        self._renewing: dict[int, bool] = {}
        self._outbox: Outbox | None = None
        self._publisher = Publisher(self, self._numbers)
        self._producers: dict[str, Producer] = {}  # of transactions, by their streams
        self._sweeping: asyncio.TimerHandle | None = None
        self._last_error = ""
        self._without_quorum: dict[Where, float] = {}  # nodes that reported no quorum, and when
        self._seeking: asyncio.Task[None] | None = None  # probes other nodes for a quorum
        self._on_hold = False  # whether requests wait for the result of that task

    # ------------------------------------------------------------ the connection

    async def open(self) -> None:
        """Connect; raise `NoNodeError` if that fails within the client's timeout."""
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
        """The node that the client is connected to, or tries to reach."""
        return self._nodes.current

    async def _run(self) -> None:
        pauses, dials, first, hopeless = (
            Pauses(*RECONNECT_PAUSES_S),
            Pauses(*DIAL_TIMEOUTS_S),
            True,
            True,
        )
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
            if not self._closing and self._nodes.turn(self.loop.time() - began > LASTING_S):
                if first and hopeless:
                    return  # every node refused the secret or the version: retrying cannot help
                hopeless = True
                dial_s = dials.next()
                await asyncio.sleep(pauses.next())

    async def _connect(self) -> None:
        self._reader = FrameReader()
        opened: asyncio.Future[None] = self.loop.create_future()
        lost: asyncio.Future[None] = self.loop.create_future()

        def accepted(connection: Connection) -> None:
            connection.filling = self._reader
            if not opened.done():
                opened.set_result(None)

        def closed(connection: Connection, error: Exception | None) -> None:
            code = error.code if isinstance(error, HelloError) else "CONNECTION_LOST"
            loss = StreamsError(code, said(error) if error else "the node closed the connection")
            for future in (opened, lost):
                if not future.done():
                    future.set_exception(loss)
            lost.exception()
            if not opened.cancelled():
                opened.exception()

        introduction = {"version": VERSION, "name": self._name}
        connection = await self._dial(
            self.where,
            lambda: Connection(self._secret, accepted, self._received, closed, introduction),
        )
        try:
            await opened
        except BaseException:  # also if the client gives up waiting
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
        """Ask the node for the addresses of the other nodes; ignore a refusal, or an answer without any."""
        with contextlib.suppress(StreamsError, ValueError):
            answer = await self.ask(lambda n: self.send(p.Admin(request=n, call="nodes")))
            self._nodes.learn(json.loads(answer.result))

    async def _dial(self, where: Where, protocol: Callable[[], Connection]) -> Connection:
        """Connect to a node: by the socket in its data directory if it is on this machine, else by TCP."""
        local, path = self._socket
        if path is not None and local == where and os.path.exists(path):
            with contextlib.suppress(OSError):
                return (await self.loop.create_unix_connection(protocol, path))[1]
        return (await self.loop.create_connection(protocol, *where, ssl=self._tls))[1]

    async def _resume(self) -> None:
        """Subscribe again on a new connection, and resend the publishes that can be sent again."""
        for subscription in list(self._subscriptions.values()):
            self.loop.create_task(self._subscribe_again(subscription))
        self._publisher.resume()

    async def _subscribe_again(self, subscription: Subscription) -> None:
        """Subscribe again until the node accepts; give up if the connection is lost, since the next one begins anew."""
        here, channel, pauses = self._connection, subscription.channel, Pauses(*RETRY_PAUSES_S)
        self._renewing[channel] = False
        while self._connection is here and not subscription.over:
            try:
                await self._ask(
                    lambda n: self.send(subscription.request(n), (), channel), None, once=True
                )
                if self._connection is not here or not self._renewing.get(channel):
                    break
                self._renewing[channel] = False  # it was accepted, and lost before this task ran
                self.send(p.Unsubscribe(), (), channel)
                continue
            except StreamsError as error:
                if not resent(error.code):
                    if not error.may_pass and error.code != "NO_SUBSCRIPTION":
                        subscription.failed(error)
                        break
                    if self._connection is not here or error.code in LOST_CODES:
                        break
                    self.send(p.Unsubscribe(), (), channel)  # the node may accept it yet
                subscription.trouble = str(error)
            await asyncio.sleep(pauses.next())
        if self._connection is here:
            self._renewing.pop(channel, None)

    def renew(self, subscription: Subscription) -> None:
        """Subscribe again because the stream's master stepped down, as soon as there is another master."""
        channel = subscription.channel
        if channel in self._renewing:
            self._renewing[channel] = True
            return
        self._renewing[channel] = False
        self.send(p.Unsubscribe(), (), channel)
        self.loop.create_task(self._subscribe_again(subscription))

    async def _alive(self) -> None:
        """Ping until the connection is lost; raise `StreamsError` (`CONNECTION_LOST`) if the node does not answer."""
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
        loss = StreamsError("CONNECTION_LOST", self._last_error)
        self._publisher.cut_off(loss, written)
        answers, self._answers = self._answers, {}
        for future, _, frame in answers.values():
            fail_future(future, loss if frame <= written else _NotSentError(loss))
        for subscription in self._subscriptions.values():
            subscription.cut_off(loss)

    async def close(self) -> None:
        """Close the connection after publishes under way and subscriptions have ended, within the client's timeout."""
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
            self._open.set()  # wakes calls that wait for a connection; they raise CLOSED
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
        """Return whether there is a live connection to a node that accepts requests; check the connection first."""
        if self._connection is None or self._outbox is None or self._going:
            return False
        if self._connection.transport.is_closing():  # the connection is lost, and replaced soon
            self._open.clear()
            return False
        self._notice_stall()
        return not self._verifying and not self._on_hold

    def _notice_stall(self) -> None:
        """Ping the node if the event loop was busy for longer than `STALL_S`; hold all requests until it answers."""
        now_s = self.loop.time()
        stalled, self._awake_s = now_s - self._awake_s > STALL_S, now_s
        if stalled and self._outbox is not None and not self._going and not self._verifying:
            self._verifying = next(self._numbers)
            self._open.clear()
            self.send(p.Ping(number=self._verifying))

    def _verified(self) -> None:
        """Take the answer to the ping that checked the connection: send the requests that wait."""
        self._verifying = 0
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send the requests that wait, unless they must still wait for another reason."""
        if not self._going and not self._verifying and not self._on_hold:
            self._open.set()
            self._publisher.go_on()

    @property
    def closing(self) -> bool:
        """Whether the client is closed and accepts no more calls."""
        return self._closing

    @property
    def trouble(self) -> str:
        """Why requests are not answered now, as a text for people; empty: nothing is wrong."""
        if self.connected:
            return self._publisher.refusal_text
        return f"no node at {self._nodes}: {self._last_error or 'no answer'}"

    def send(self, command: Command, blobs: Sequence[Blob] = (), channel: int = 0) -> None:
        """Send a frame, together with the others of this turn of the event loop; drop it if there is no connection."""
        if self._outbox is not None:
            self._outbox.send(encode(command, blobs, channel))

    @property
    def frames(self) -> int:
        """The number of frames sent by this connection, which is the number of the last frame."""
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
                # Here, and not in the task that waits for the answer: messages may follow immediately.
                if channel in self._subscriptions:
                    self._subscriptions[channel].began(command)
                if channel in self._renewing:
                    self._renewing[channel] = False  # an earlier loss is made good
                future, *_ = self._answers.pop(command.request, _NO_WAITER)
                if future is not None and not future.done():
                    future.set_result((command, frame.blob))
            case p.Missed() | p.Lost() | p.Recalled():
                self._hand_to_subscription(channel, command)
            case p.Ping():
                self.send(p.Pong(number=command.number))
            case p.Pong() if command.number == self._verifying:
                if self._verifying:
                    self._verified()
            case p.GoingAway():
                self._prepare_to_leave("the node has ended in order")
                self.send(p.Pong(number=command.number))
            case _:
                future, *_ = self._answers.pop(getattr(command, "request", 0), _NO_WAITER)
                if future is None:
                    self._hand_to_subscription(channel, command)
                elif isinstance(command, p.Failed):
                    if not future.done():
                        future.set_exception(
                            StreamsError(command.code, command.text, command.no_quorum)
                        )
                elif not future.done():
                    future.set_result((command, frame.blob))

    def _prepare_to_leave(self, why: str) -> None:
        """Send this node no more requests; the client leaves it when those under way are answered (`_leave`)."""
        self._open.clear()
        self._going = True
        self._last_error = why

    def _leave(self) -> None:
        """Close the connection to a node that the client is to leave, once nothing is under way to it."""
        if (
            self._connection is not None
            and not self._answers
            and not self._publisher.awaits_answers
        ):
            assert self._outbox is not None
            for subscription in self._subscriptions.values():
                subscription.send_acks()
            self._outbox.flush()
            self._connection.close()

    def tries_again(self, error: StreamsError, *, idempotent: bool) -> bool:
        """Return whether a request that failed with `error` is sent again, until its deadline.

        It is if the cause is a change of nodes or roles, and either nothing was done or the request is `idempotent`.
        An idempotent request is also sent again when the connection was lost.
        """
        if self._closing:
            return False
        if error.code in ("CONNECTION_LOST", "CLOSED"):
            return idempotent
        if not resent(error.code) or not (error.nothing_done or idempotent):
            return False
        return not self._gives_up(error)

    def _gives_up(self, error: StreamsError) -> bool:
        """Return whether a request that was refused for want of a quorum fails now; see rule 7."""
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
        """Switch to the first of the nodes `others` that answers; hold requests for up to `SEEK_S` meanwhile."""
        probes = [self.loop.create_task(self._probe(where)) for where in others]
        began_s = self.loop.time()
        try:
            reachable = await _first(probes, began_s + SEEK_S)
            self._on_hold = False
            if reachable is None:
                self._send_waiting()
                reachable = await _first(probes, began_s + DIAL_TIMEOUTS_S[0])
        finally:
            for task in probes:
                task.cancel()
        self._seeking = None
        if reachable is not None and not self._going:
            self._nodes.prefer(reachable)
            self._prepare_to_leave(why)
            self._leave()

    async def _probe(self, where: Where) -> Where | None:
        """Return `where` when the node there has answered the hello; None if it refuses, or cannot be reached."""
        answered: asyncio.Future[bool] = self.loop.create_future()

        def settle(accepted: bool) -> None:
            if not answered.done():
                answered.set_result(accepted)

        introduction = {"version": VERSION, "name": self._name}
        connection: Connection | None = None
        try:
            connection = await self._dial(
                where,
                lambda: Connection(
                    self._secret,
                    lambda _: settle(True),
                    lambda *_: None,
                    lambda *_: settle(False),
                    introduction,
                ),
            )
            return where if await answered else None
        except (OSError, UnicodeError):
            return None
        finally:
            if connection is not None:
                connection.abort()

    def _hand_to_subscription(self, channel: int, command: Any) -> None:
        subscription = self._subscriptions.get(channel)
        if subscription is not None:
            subscription.handle(command)

    async def ask(self, send: Callable[[int], object], timeout: float | None = None) -> Any:
        """Send a request and return the command that answers it.

        `send` is called with the request's number. Raises `DeadlineError` after `timeout` seconds (None: the client's
        timeout), and `StreamsError` if the node refuses or the client is closed.
        """
        return (await self._ask(send, timeout))[0]

    async def _ask(
        self, send: Callable[[int], object], timeout: float | None, *, once: bool = False
    ) -> Any:
        """Send a request and return the answering command and its blob, as `ask`.

        `once`: raise also errors after which nothing was done, instead of sending the request again.
        """
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
            # Nothing was done: ask again, perhaps another node.
            await asyncio.sleep(RETRY_PAUSES_S[0])

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
        """Return the error text of a request that was not answered before its timeout."""
        if number not in self._answers:
            why = self.trouble or "the node takes nothing now"
            return f"nothing was sent before the timeout of this call: {why}. See to the node, and try again"
        return (
            "the node has not answered before the timeout of this call, and may have done what was asked or not: look, "
            "or ask again with a longer timeout"
        )

    def _deadline(self, timeout: float | None) -> float:
        """Return the deadline of a call with this timeout (None: the client's), by the clock of the event loop."""
        seconds = self.timeout if timeout is None else check_seconds("timeout", timeout)
        return self.loop.time() + seconds

    def _sweep(self) -> None:
        """Fail the calls whose deadline has passed. A periodic check is cheaper than a timer for each call."""
        now = self.loop.time()
        self._sweeping = self.loop.call_later(SWEEP_INTERVAL_S, self._sweep)
        late = [future for future, deadline, _ in self._answers.values() if deadline < now]
        for future in late:
            fail_future(future, TimeoutError())
        for future, error in self._publisher.overdue(now):
            fail_future(future, error)

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
        """Publish a message; return its offset when it is on disk.

        In an ephemeral stream, return how many consumers and groups received it. `acks` says on whose disks the message
        must be: of a `quorum` of replicas, of the `master`, or of `all` replicas. With `none` the call returns -1 when
        the message was sent; it may be lost without notice. `id` deduplicates: raises `DuplicateIdError` if the stream
        already holds a message with it. If the message was sent again after a lost connection, the offset of the
        stored message is returned instead. Raises `DeadlineError` after `timeout` seconds.
        """
        check_text("stream", stream)
        check_text("topic", topic)
        data, deadline = as_bytes("payload", payload), self._deadline(timeout)
        safety = acks_value(acks)
        if id is None and headers is None:
            future = self._publisher.put_one(stream, topic, data, deadline, safety)
        else:
            ids: list[bytes | None] | None = None if id is None else [check_id(id)]
            encoded = None if headers is None else [check_headers(headers)]
            future = self._publisher.put(stream, topic, [data], ids, encoded, deadline, safety)
        try:
            return int((await future)[0])
        except TimeoutError as error:
            raise DeadlineError(LATE_TEXT) from error

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
        """Publish messages in this order; return the offset of each. `acks`, `timeout` and errors: as of `publish`.

        `ids`: an ID for each message, or None. `id`: one ID for all of them: either all are stored or none, and a
        second time none. `atomic`: all become visible together or none, however many there are, and they are stored
        exactly once whatever fails meanwhile.
        """
        safety = acks_value(acks)
        if atomic:
            if safety != acks_value("quorum"):
                raise StreamsError(
                    "BAD_REQUEST",
                    "an atomic publish always waits for a quorum: leave acks out",
                )
            return await self._publish_atomically(stream, payloads, ids or id or topic, timeout)
        check_text("stream", stream)
        check_text("topic", topic)
        payloads = check_list("payloads", payloads)
        if not len(payloads):
            return []
        if id is not None:
            if ids is not None or topic:
                raise StreamsError(
                    "BAD_REQUEST", "give one ID for all messages, or one for each; and no topic"
                )
            blobs = _all_bytes(payloads)
            deadline = self._deadline(timeout)
            future = self._publisher.put_together(stream, blobs, check_id(id), deadline, safety)
            return list(await _published(future))
        ids = check_list("ids", ids) if ids is not None else None
        if ids is not None and len(ids) != len(payloads):
            raise StreamsError("BAD_REQUEST", f"{len(ids)} IDs for {len(payloads)} messages")
        checked_ids = [None if id_ is None else check_id(id_) for id_ in ids] if ids else None
        blobs, deadline = _all_bytes(payloads), self._deadline(timeout)
        futures = self._publisher.put_many(stream, topic, blobs, checked_ids, deadline, safety)
        offsets = await _published(asyncio.gather(*futures))
        return list(itertools.chain.from_iterable(offsets))

    async def _publish_atomically(
        self, stream: str, payloads: Sequence[Payload], more: object, timeout: float | None
    ) -> list[int]:
        if more:
            raise StreamsError("BAD_REQUEST", "an atomic publish cannot have IDs or a topic")
        blobs = _all_bytes(check_list("payloads", payloads))
        if not blobs:
            return []
        try:
            async with (
                asyncio.timeout_at(self._deadline(timeout)),
                self.transaction(stream) as transaction,
            ):
                await transaction.put_all(blobs)
        except TimeoutError as error:
            raise DeadlineError(LATE_TEXT) from error
        return list(transaction.offsets)

    @contextlib.asynccontextmanager
    async def transaction(self, stream: str) -> AsyncIterator[Transaction]:
        """Publish messages that become visible all together, or not at all.

        The transaction is committed when the block ends, and dropped if the block raises. Raises `StreamsError`; after
        the codes `DEADLINE` and `CONNECTION_LOST` at the end of the block it may be committed or not.
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

        `keep`: drop the messages that earlier epochs have staged, except for these sequences; None: drop nothing.
        `lifetime`: the node forgets the producer after so many seconds without use; None: never. `session`: a unique
        name in place of an epoch; a new session gets the next epoch, and messages staged before are dropped. Raises
        `StreamsError` with the code `FENCED` if a later epoch has begun.
        """
        return await begin(self, stream, name, epoch, keep, lifetime, session)

    def put_staged(
        self,
        stream: str,
        payloads: list[bytes],
        staging: p.Staging,
        wanted: Callable[[], bool] | None = None,
    ) -> asyncio.Future[Any]:
        """Stage messages of a producer (`Stage.put_soon`); the future is done when they are stored or refused.

        `wanted`: whether they are sent even if no task waits for them any more.
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
        command = p.Publish(stream=stream, topic=topic, response=name)
        if timeout is not None:
            command.timeout = max(1, int(timeout * 1e6))  # 0 stands for the configured timeout

        def send(number: int) -> None:
            command.request = number
            self.send(command, [blob])

        # The node keeps the time. If the node is gone, the heartbeat notices its silence and this call fails then.
        give_up_s = math.inf if timeout is None else timeout + ANSWER_GRACE_S
        answer, data = await self._ask(send, give_up_s)
        if answer.code:
            raise NoAnswerError(answer.code, f"no answer from {stream!r}")
        return Records(data).payload(0)

    async def respond(self, response: str, payload: Payload, *, confirm: bool = True) -> None:
        """Answer a request, by the name of its response stream.

        Raises `StreamsError` (`RS_GONE`) if the requester no longer waits. Without `confirm` the call does not wait for
        the node, and does not raise.
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

        `group`: share the messages with the other members of this consumer group. `consumer`: the ID of a single
        consumer whose position the node keeps; its messages are acked, and come in order. A subscription with an ID
        that is in use takes over, and the earlier one ends with `CONSUMER_TAKEN`. `start` is ignored once a group or a
        consumer has a position, unless it is an offset. `matcher`: receive only messages of an ephemeral stream whose
        topic matches. `prefetch`: the most messages buffered here. `ack_wait`: redeliver a message that is not acked
        within so many seconds; 0: no limit. `identity`: the identity of the stream that `start` is an offset of
        (`Subscription.identity`); raises `StreamsError` with the code `STREAM_REPLACED` if that stream was deleted and
        created anew.
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
            raise BadValueError("exclusive applies to the members of a group: name a group")
        subscription = Subscription(
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
            # Not earlier: a reconnect would subscribe it too.
            self._subscriptions[subscription.channel] = subscription
            self.send(subscription.request(number), (), subscription.channel)

        deadline, pauses = self._deadline(timeout), Pauses(*RETRY_PAUSES_S)
        while True:
            try:
                await self._ask(send, deadline - self.loop.time(), once=True)
                return subscription
            except BaseException as error:
                if self._subscriptions.pop(subscription.channel, None) is not None:
                    # The node may accept it yet.
                    self.send(p.Unsubscribe(), (), subscription.channel)
                again = isinstance(error, StreamsError) and self.tries_again(error, idempotent=True)
                if not again or not await self._pause(pauses, deadline):
                    raise

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; its unacknowledged messages go to other members of the group."""
        if self._connection is not None and not self._closing:
            with contextlib.suppress(StreamsError):
                await self.ask(
                    lambda n: self.send(p.Unsubscribe(request=n), (), subscription.channel)
                )
        self._subscriptions.pop(subscription.channel, None)

    # ------------------------------------------------------------ streams

    async def admin(self, call: str, timeout: float | None = None, **arguments: Any) -> Any:
        """Call an administrative command of the node; return its result, decoded from JSON.

        Raises `StreamsError` if the node refuses, and `BadValueError` if JSON cannot express the arguments. Idempotent
        calls (`IDEMPOTENT_CALLS`) are sent again when the connection is lost.
        """
        check_text("call", call)
        try:
            encoded = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadValueError(
                f"{call}: the arguments cannot be written as JSON: {said(error)}"
            ) from error
        deadline, pauses = self._deadline(timeout), Pauses(*RETRY_PAUSES_S)
        while True:
            try:
                answer = await self.ask(
                    lambda n: self.send(p.Admin(request=n, call=call, arguments=encoded)),
                    deadline - self.loop.time(),
                )
                return json.loads(answer.result)
            except StreamsError as error:
                again = self.tries_again(error, idempotent=call in IDEMPOTENT_CALLS)
                if not again or not await self._pause(pauses, deadline):
                    raise

    async def _pause(self, pauses: Pauses, deadline: float) -> bool:
        """Wait before a retry; return False if there is no time left for one."""
        pause = pauses.next()
        if self._closing or self.loop.time() + pause >= deadline:
            return False
        await asyncio.sleep(pause)
        return True

    async def ensure(self, stream: str, mode: str = "warn", **settings: Any) -> dict[str, Any]:
        """Create a stream with these settings if it does not exist; return what was done, and which settings differ.

        `mode` says what to do if the stream exists with other settings: "warn" only reports the differences,
        "overwrite" changes the settings, "strict" refuses. In a cluster, the setting `region` says in which region the
        stream is kept, and cannot be changed later; the default is `global`.
        """
        return dict(await self.admin("ensure", name=stream, asked=settings, mode=mode))

    async def streams(self) -> list[dict[str, Any]]:
        """Return all streams of the node or cluster, with their groups."""
        return list(await self.admin("list"))

    async def describe(self, stream: str) -> dict[str, Any]:
        """Return the settings and the state of a stream."""
        return dict(await self.admin("describe", name=stream))

    async def delete(self, stream: str, *, dead_letters: bool = False) -> list[str]:
        """Delete a stream with all its messages, and with `dead_letters` its dead-letter stream; return their names."""
        answer = await self.admin("delete", name=stream, dead_letters=dead_letters)
        return list(answer["deleted"])

    async def purge(self, stream: str, before: int | None = None) -> dict[str, int]:
        """Delete all messages of a stream, or those before an offset.

        An offset within a committed transaction cuts it: its later messages stay. Return the
        stream's `first` and `end` offsets, and how many messages were `purged`.
        """
        return dict(await self.admin("purge", name=stream, before=before))

    async def redrive(
        self,
        stream: str,
        offsets: Sequence[int] | None = None,
        most: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Redeliver dead letters, each to the group that gave it up.

        `offsets`: the offsets of the dead letters; None: all. `most`: the most dead letters to redeliver. Return how
        many were `redriven`, how many were so `already`, how many are `left`, and which were `refused` (offset, code,
        text), among them those of `offsets` that do not exist (`NO_LETTER`) or were redriven before (`REDRIVEN`).
        """
        chosen = None if offsets is None else list(check_list("offsets", offsets))
        return dict(await self.admin("redrive", timeout, name=stream, offsets=chosen, most=most))

    async def groups(self, stream: str) -> list[dict[str, Any]]:
        """Return the consumer groups of a stream."""
        return list(await self.admin("groups", name=stream))

    async def group(self, stream: str, group: str) -> dict[str, Any]:
        """Return the state of a consumer group, and why it receives nothing, if so."""
        return dict(await self.admin("group", name=stream, group=group))

    async def reset_group(self, stream: str, group: str, to: Start | int) -> int:
        """Move a group without members to "start", "end" or an offset; return its new position."""
        answer = await self.admin("reset_group", name=stream, group=group, to=to)
        return int(answer["position"])

    async def delete_group(self, stream: str, group: str) -> None:
        """Delete a group without members, and its position."""
        await self.admin("delete_group", name=stream, group=group)


async def _first(tasks: Sequence[asyncio.Task[Where | None]], deadline: float) -> Where | None:
    """Return the first result of the tasks that is not None; None if there is none by the deadline."""
    loop = asyncio.get_running_loop()
    while True:
        for task in tasks:
            if task.done() and task.exception() is None and (where := task.result()) is not None:
                return where
        pending, left_s = [task for task in tasks if not task.done()], deadline - loop.time()
        if not pending or left_s <= 0:
            return None
        await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)


def _all_bytes(payloads: Sequence[Payload]) -> list[bytes]:
    if set(map(type, payloads)) == {bytes}:  # the common case: nothing to convert
        return cast("list[bytes]", list(payloads))
    return [as_bytes("a payload", payload) for payload in payloads]


async def _published(future: asyncio.Future[Any]) -> Any:
    try:
        return await future
    except TimeoutError as error:
        raise DeadlineError(LATE_TEXT) from error


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
    """Connect to the node at `where` ("host:port") and return a client.

    `where` may hold several nodes of a cluster, as a list or separated by commas; the client uses any of them. Without
    `where`, connect to the node that runs in the directory `data`. `secret`: the node's secret (bytes or hexadecimal
    digits); without, it is read from `data`. `timeout`: seconds for each call. `wait_for_quorum`: retry requests that
    are refused because a majority of the nodes is lost until their deadline; else they fail at once. Raises
    `NoNodeError` if no node can be reached.
    """
    check_text("name", name)
    check_seconds("timeout", timeout)
    find = partial(Address.find, where, secret=secret, data=data)
    address = await asyncio.to_thread(find)  # it reads files, and may probe the node's port
    return await connect_to_address(
        address, name=name, timeout=timeout, tls=tls, wait_for_quorum=wait_for_quorum
    )


async def connect_to_address(
    address: Address,
    *,
    name: str = "",
    timeout: float = TIMEOUT,
    tls: ssl.SSLContext | None = None,
    wait_for_quorum: bool = False,
) -> Client:
    """Connect to the node with this address and return a client; raise `NoNodeError` if that fails."""
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
