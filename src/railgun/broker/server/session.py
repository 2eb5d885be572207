"""Serve one client: its connection to the node, and all its publishes, subscriptions and requests.

Rules:

1. A wrong request is answered with `Failed`, a code and a sentence, and the session goes on. Bytes that are no frame
   end the session. Nothing a client sends ends the node.
2. A session from which nothing comes for `SILENCE_S` seconds is dead: clients ping. A forwarded session is dead after
   `SILENCE_PASSED_ON_S`, because the node that forwards it pings several times a second and is frozen if it does not.
   The messages of its consumers go to other consumers. A session that is not read for a while, because what it
   published is not on disk yet, is sent a sign of life every `PULSE_S`.
3. A consumer gets no more than its credit, and what waits in the socket is bounded: messages are read from disk when
   there is room for them.
4. Messages of ephemeral streams go to the socket at once. When too much waits there, the session's listeners have no
   credit until there is room: they lose messages, or leave them to the other members of their group.
5. A publisher that is faster than the disk is not read until what it has sent is stored.
6. A node that is about to end says so (`GoingAway`). From then on the session refuses requests with `STOPPING`, without
   doing any part of them; it is *drained* when the client has confirmed the `GoingAway` and everything taken before is
   answered.
7. In a cluster, what another node serves is passed on to that node (`broker.server.relay`). When the master of a stream
   changes, members of its groups are told to subscribe again (`NO_MASTER`); a client with publishes that the old master
   does not answer is cut off, and reconnects. A master that hands over tells members before (`Consumer.let_go`), and
   takes their acks until they have unsubscribed.
8. Consumers that end because of what nodes do are *sent away* (`Group.send_away`): their deliveries do not
   count as failed. That is so when this node is about to end, when their stream changes its master, when they are cut
   off, and when a forwarded session ends, unless the forwarding node says that the client has left (`GoingAway`). A
   client that leaves by itself, or is silent, counts as dead.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final

from google.protobuf.message import Message

from railgun.broker.errors import (
    CopyBehindError,
    DamagedLogError,
    NoMasterError,
    StoppingError,
    StreamReplacedError,
    TrimmedError,
)
from railgun.broker.protocol.groups import (
    DAY,
    LONGEST_DELAY,
    Command,
    Deliver,
    Missed,
    Recalled,
    Receipt,
    Stale,
)
from railgun.broker.protocol.topics import check_topic
from railgun.broker.server.relay import Relay
from railgun.broker.settings import SECOND, TRACKED, check_group, check_name
from railgun.broker.streams import admin
from railgun.broker.streams.copies import Acks
from railgun.broker.streams.groups import GroupDriver, OnSaved
from railgun.broker.streams.listener import (
    MAX_UNSENT_BYTES,
    SOFT_UNSENT_BYTES,
    Listener,
    slice_batches,
)
from railgun.broker.streams.node import Ephemeral, Node, refuse_hidden
from railgun.broker.streams.persistent import Persistent, Stored
from railgun.broker.streams.routing import There
from railgun.errors import RailgunError
from railgun.transport.commands import LARGEST, Blob, Frame, FrameError, FrameReader, encode
from railgun.transport.connection import Connection
from railgun.transport.outbox import Outbox
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import HAS_IDS, check, head, split

SILENCE_S: Final = 20.0
SILENCE_PASSED_ON_S: Final = 3.0
PULSE_S: Final = 0.4
MAX_UNSTORED_BYTES: Final = 32 << 20  # of publishes that are not answered yet
READ_BYTES: Final = 256 << 10  # read from a log at once
GOING_AWAY_NUMBER: Final = 1 << 62  # number of a GoingAway: above the numbers of all pings
REQUEST_KINDS: Final = (p.Publish, p.Subscribe, p.Admin)
MAX_TIMEOUT_US: Final = 24 * 3600 * SECOND


class RequestError(RailgunError):
    """The stream or the session cannot do what was requested."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Wire(Connection):
    """A connection that calls `resumed` when there is room to write again."""

    resumed: Callable[[], None] = staticmethod(lambda: None)

    def resume_writing(self) -> None:
        """Report that the transport's buffer has been sent."""
        self.resumed()


class Consumer:
    """A subscription of a session to a persistent stream."""

    def __init__(self, session: Session, channel: int, name: str, stream: Persistent) -> None:
        self.session = session
        self.channel = channel
        self.name = name
        self.stream = stream
        self.driver: GroupDriver | None = None
        self.outbox: deque[Deliver] = deque()
        self.begun = False
        """Whether the client was told that it is subscribed."""
        self.stop: RailgunError | None = None
        """Why nothing more can be read for this consumer, or None."""
        self._stop_reported = False
        self.gone: RailgunError = RequestError("NO_SUBSCRIPTION", "it ended before it began")
        """Why the subscription has ended, if it has."""
        self.going = False
        """Whether the client was told to subscribe again and has not left yet: it may still ack."""

    def deliver(self, delivers: list[Deliver]) -> None:
        """Queue deliveries, and send them as far as there is room."""
        if not self.going:
            self.outbox.extend(delivers)
            self.flush()

    def flush(self) -> None:
        """Send queued deliveries as far as there is room."""
        while self.outbox and self.session.room:
            ranges: list[p.Range] = []
            blobs: list[Blob] = []
            size, epoch = 0, self.outbox[0].epoch
            while self.outbox and size < READ_BYTES and self.outbox[0].epoch == epoch:
                deliver = self.outbox.popleft()
                try:
                    batches, end = self.stream.read(deliver.first, deliver.end, READ_BYTES - size)
                except TrimmedError as error:
                    if ranges:  # send what was read first
                        self.outbox.appendleft(deliver)
                        break
                    self._missed(deliver, error.first)
                    continue
                except DamagedLogError as error:
                    if ranges:  # send what was read first
                        self.outbox.appendleft(deliver)
                        break
                    damage = self.stream.damage
                    # In a cluster this copy is mended soon: the client subscribes again.
                    if damage is None:
                        self.session.lose(self, error)
                        return
                    self.outbox.appendleft(deliver)
                    self._give_back_from(damage.offset)
                    continue
                except RailgunError as error:
                    self.session.lose(self, error)
                    return
                read = sum(map(len, batches))
                if blobs and size + read > LARGEST // 2:  # a large batch gets a frame of its own
                    self.outbox.appendleft(deliver)
                    break
                count = end - deliver.first
                ranges.append(p.Range(first=deliver.first, count=count, delivery=deliver.delivery))
                blobs += batches
                size += read
                if end < deliver.end:
                    self.outbox.appendleft(replace(deliver, first=end))
            if ranges:
                self.session.send(p.Deliver(ranges=ranges, epoch=epoch), blobs, self.channel)
        if self.stop is not None and not self._stop_reported and not self.outbox and self.begun:
            self._stop_reported = True
            self.session.fail(0, self.stop, self.channel)

    def _give_back_from(self, offset: int) -> None:
        """Return all deliveries from `offset` on to the group, because they cannot be read."""
        assert self.driver is not None
        receipts = [
            Receipt(max(delivery.first, offset), delivery.end, delivery.delivery, delivery.epoch)
            for delivery in self.outbox
            if delivery.end > offset
        ]
        before = [delivery for delivery in self.outbox if delivery.first < offset]
        self.outbox = deque(replace(delivery, end=min(delivery.end, offset)) for delivery in before)
        self.driver.unsent(self.name, receipts)

    def stopped(self, error: RailgunError) -> None:
        """Tell the client, after what is on its way to it, that nothing more can be read."""
        self.stop = self.stop or error
        self.flush()

    def _missed(self, deliver: Deliver, first: int) -> None:
        """Return messages up to `first`, which are no longer stored, to the group, which reports them as missed."""
        assert self.driver is not None
        gone = min(first, deliver.end)
        if gone < deliver.end:
            self.outbox.appendleft(replace(deliver, first=gone))
        receipt = Receipt(deliver.first, gone, deliver.delivery, deliver.epoch)
        self.driver.nack(self.name, [receipt], 0, "", None)

    def tell(self, command: Command) -> None:
        """Send the client a notice from its group."""
        match command:
            case Missed(first, end):
                self.session.send(p.Missed(first=first, end=end), (), self.channel)
            case Recalled(_, first, end):
                self.outbox.clear()  # all of the queue was recalled: it lies above what came back
                self.session.send(p.Recalled(first=first, end=end), (), self.channel)

    def lost(self, error: RailgunError) -> None:
        """End the subscription because of `error`."""
        self.session.lose(self, error)

    def let_go(self, error: RailgunError) -> None:
        """Stop delivering and let the client subscribe again. Its acks count until it has unsubscribed."""
        if self.begun and not self.going:
            self.going = True
            self.outbox.clear()
            self.session.fail(0, error, self.channel)

    def leave(self, graceful: bool) -> None:
        """Leave the group. `graceful`: the client has unsubscribed; otherwise it counts as dead."""
        if self.going:
            self.send_away()
        elif self.driver is not None:
            self.stream.leave(self.driver, self.name, graceful)

    def send_away(self) -> None:
        """Leave the group without blame: the consumer did nothing wrong (rule 8)."""
        if self.driver is not None:
            self.stream.send_away(self.driver, self.name)


class Session:
    """One client's session at this node."""

    _numbers: ClassVar[int] = 0

    def __init__(self, node: Node, connection: Wire) -> None:
        Session._numbers += 1
        self.name = f"{connection.who.get('name') or 'client'}-{Session._numbers}"
        self.node = node
        self.connection = connection
        self.heard = time.monotonic()
        self.forwarded = bool(connection.who.get("forwarded"))
        """Whether another node has passed the session on."""
        self.subscriptions: dict[int, Consumer | Listener] = {}
        self._relay: Relay | None = None  # None on a node that runs alone
        self._reader = connection.filling = FrameReader()
        self._unstored = 0
        self._requests: dict[str, int] = {}  # request numbers by the name of their response
        self._paused_for_good = False
        self._going = 0  # the number of the GoingAway that was sent, or 0
        self._confirmed = 0  # the highest number of a pong
        # Whether an end of the session means that the client has left.
        self._client_gone = not self.forwarded
        self._calls = 0  # admin calls under way
        self.paused = False
        """Whether the connection is not read for the time being."""
        self._outbox = Outbox(node.loop, connection.transport, self._flushed)
        # From SOFT_UNSENT_BYTES bytes on, the transport calls `resumed` when it has room again.
        connection.transport.set_write_buffer_limits(high=SOFT_UNSENT_BYTES - 1)
        connection.resumed = self._resumed

    # ------------------------------------------------------------ sending

    @property
    def room(self) -> bool:
        """Whether messages may be sent, besides answers."""
        return self._outbox.unsent < SOFT_UNSENT_BYTES

    def drop(self, channel: int) -> None:
        """Forget the subscription on `channel`."""
        self.subscriptions.pop(channel, None)

    @property
    def flooded(self) -> bool:
        """Whether nothing but answers may be sent."""
        return self._outbox.unsent >= MAX_UNSENT_BYTES

    def hold(self) -> None:
        """Withhold credit from all listeners until there is room in the socket."""
        for subscription in self.subscriptions.values():
            if isinstance(subscription, Listener):
                subscription.hold()

    def send(self, command: Message, blobs: Sequence[Blob] = (), channel: int = 0) -> None:
        """Send a frame, together with the others of this turn of the event loop."""
        self._outbox.send(encode(command, blobs, channel))

    def _flushed(self) -> None:
        if self.room:
            self._resumed()

    def _resumed(self) -> None:
        for subscription in list(self.subscriptions.values()):
            subscription.flush()
        if self._relay is not None:
            self._relay.resume_upstreams()

    def pass_back(self, frame: Blob) -> None:
        """Send a frame of another node unchanged."""
        self._outbox.send([frame])

    def fail(self, request: int, error: Exception, channel: int = 0) -> None:
        """Send `Failed` for a request or a channel, with the code and the text of `error`."""
        code = getattr(error, "code", "BAD_REQUEST")
        no_quorum = isinstance(error, NoMasterError) and error.no_quorum
        failed = p.Failed(request=request, code=code, text=str(error)[:2000], no_quorum=no_quorum)
        self.send(failed, (), channel)

    # ------------------------------------------------------------ receiving

    def received(self, data: bytes) -> None:
        """Handle bytes from the client: decode their frames and serve them, or end the session if they are no
        frames."""
        self.heard = time.monotonic()
        try:
            if self.node.routing is None:
                for frame in self._reader.feed(data):
                    self.take(frame)
            else:
                if self._relay is None:
                    self._relay = Relay(self, self.node.routing)
                for raw in self._reader.raw(data):
                    self._relay.take(raw)
        except FrameError as error:
            self.fail(0, error)
            self._outbox.flush()
            self.connection.close(error)

    def take(self, frame: Frame) -> None:
        """Serve a frame on this node. A `RailgunError` is answered with `Failed`."""
        try:
            if self._going and isinstance(frame.command, REQUEST_KINDS):
                raise StoppingError("this node is about to end; nothing was done: ask another node")
            self._do(frame)
        except FrameError:
            raise
        except RailgunError as error:
            if isinstance(frame.command, p.Publish):
                self.node.refused[getattr(error, "code", "BAD_REQUEST")] += 1
            self.fail(getattr(frame.command, "request", 0), error, frame.channel)

    def _do(self, frame: Frame) -> None:
        command = frame.command
        match command:
            case p.Publish():
                self._publish(command, frame.blob)
            case p.Ack() | p.Nack() | p.InProgress():
                self._ack_received(frame.channel, command)
            case p.Grant():
                self._grant(frame.channel, command.credit)
            case p.Respond():
                self._respond(command, frame.blob)
            case p.Subscribe():
                self._subscribe(frame.channel, command)
            case p.Unsubscribe():
                subscription = self.subscriptions.pop(frame.channel, None)
                if subscription is not None:
                    subscription.leave(graceful=True)
                self.send(p.Unsubscribed(request=command.request), (), frame.channel)
            case p.Admin():
                self._administer(command)
            case p.Ping():
                self.send(p.Pong(number=command.number))
            case p.Pong():
                self.confirmed(command.number)
            case p.GoingAway() if self.forwarded:
                self._client_gone = True
            case _:
                raise FrameError(f"{type(command).__name__} is not a command for a node")

    def go_away(self) -> None:
        """Tell the client that this node is about to end, and refuse requests from now on."""
        if not self._going:
            self._going = GOING_AWAY_NUMBER
            if self._relay is not None:
                self._relay.give_up()
            self.send(p.GoingAway(number=self._going))
            self._outbox.flush()

    @property
    def going(self) -> bool:
        """Whether requests are refused because the node is about to end."""
        return self._going > 0

    def confirmed(self, number: int) -> None:
        """Note that the client has answered the ping `number`."""
        self._confirmed = max(self._confirmed, number)

    @property
    def drained(self) -> bool:
        """Whether the client has confirmed that this node ends, and has no request under way."""
        relayed = self._relay is not None and self._relay.busy
        under_way = self._unstored or self._calls or self._requests or relayed
        return self._confirmed >= GOING_AWAY_NUMBER and not under_way

    @property
    def consumes(self) -> bool:
        """Whether the client has consumers of groups, here or at other nodes, that may still ack."""
        local = self.subscriptions.values()
        if any(
            isinstance(subscription, Consumer)
            and subscription.driver
            and subscription.driver.tracked
            for subscription in local
        ):
            return True
        return self._relay is not None and self._relay.consumes

    def pause_reading(self, for_good: bool = False) -> None:
        """Stop reading the connection, for the time being or `for_good`."""
        self._paused_for_good |= for_good
        if not self.paused:
            self.paused = True
            with contextlib.suppress(RuntimeError):  # the connection is closing
                self.connection.transport.pause_reading()
        if for_good and self._relay is not None:
            self._relay.give_up()

    def resume_reading(self) -> None:
        """Read the connection again, unless too much is unstored, another node takes no more, or reading ended for
        good."""
        if not self.paused or self._paused_for_good or self._unstored > MAX_UNSTORED_BYTES // 2:
            return
        if self._relay is None or not self._relay.full:
            self.paused = False
            self.heard = time.monotonic()  # what came meanwhile is about to be read
            with contextlib.suppress(RuntimeError):
                self.connection.transport.resume_reading()

    def send_sign_of_life(self) -> None:
        """Send a sign of life to a client whose pings are not read."""
        if self.room:
            self.send(p.Pong())

    def silent(self, now_s: float) -> bool:
        """Return whether the client, or the node that passes it on, was silent for so long that it must be dead."""
        limit_s = SILENCE_PASSED_ON_S if self.forwarded else SILENCE_S
        return now_s - self.heard > limit_s

    def add_unstored(self, size: int) -> None:
        """Count `size` bytes as waiting. Stop reading if too many wait."""
        self._unstored += size
        if self._unstored > MAX_UNSTORED_BYTES:
            self.pause_reading()

    def remove_unstored(self, size: int) -> None:
        """Count `size` bytes as waiting no more. Read on if that leaves room."""
        self._unstored -= size
        self.resume_reading()

    # ------------------------------------------------------------ publishing

    def _publish(self, command: p.Publish, blob: bytearray | memoryview) -> None:
        refuse_hidden(command.stream)
        stream = self.node.get(command.stream)
        batches = split(blob)
        if not batches:
            raise RequestError("BAD_REQUEST", "a publish has at least one message")
        for batch in batches:
            check(batch)
        if isinstance(stream, Ephemeral) and command.HasField("staging"):
            raise RequestError(
                "NOT_PERSISTENT",
                f"stream {stream.name!r} is ephemeral: nothing can be staged for it",
            )
        if isinstance(stream, Ephemeral):
            self._publish_ephemeral(stream, command, batches)
            return
        if command.topic or command.response:
            what = "topics" if command.topic else "responses"
            raise RequestError(
                "NOT_EPHEMERAL", f"stream {stream.name!r} is persistent: it has no {what}"
            )
        if command.together and len(batches) > 1:
            raise RequestError(
                "BAD_REQUEST",
                "messages published together (together) have to be in one record batch",
            )
        if command.acks not in p.Acks.values():
            raise RequestError(
                "BAD_REQUEST", f"acks is {command.acks}; the levels are 0 to {max(p.Acks.values())}"
            )
        self.add_unstored(len(blob))
        if self._relay is not None:
            self._relay.published(stream.name)
        answer = partial(self._stored, command, len(blob))
        if command.HasField("staging"):
            try:
                self.node.check_identity(stream, command.staging.identity)
            except StreamReplacedError as error:
                answer(error)
                return
            if any(head(batch).flags & HAS_IDS for batch in batches):
                answer(
                    RequestError(
                        "BAD_REQUEST",
                        "staged messages have no IDs: they are committed once without them",
                    )
                )
                return
            stream.producing.stage(command.staging, batches, len(blob), answer)  # type: ignore[arg-type]
            return
        acks = Acks(command.acks)
        stream.publish(batches, answer, together=command.together, sender=self, acks=acks)  # type: ignore[arg-type]
        if command.acks == p.NONE:
            self.send(p.Published(request=command.request))

    def _stored(self, command: p.Publish, size: int, outcome: Stored | RailgunError) -> None:
        request = command.request
        self.remove_unstored(size)
        if self._relay is not None:
            self._relay.answered(command.stream)
        if isinstance(outcome, RailgunError):
            self.node.refused[getattr(outcome, "code", "BAD_REQUEST")] += 1
        if command.acks == p.NONE:  # it was answered when it was taken
            return
        if isinstance(outcome, RailgunError):
            self.fail(request, outcome)
            if isinstance(outcome, NoMasterError) and self._relay is not None:
                self._relay.was_refused(command.stream)
            return
        refused = [p.Refused(index=n, code=code, offset=o) for n, code, o in outcome.refused]
        self.send(
            p.Published(request=request, base=outcome.base, stored=outcome.count, refused=refused)
        )

    def _publish_ephemeral(
        self, stream: Ephemeral, command: p.Publish, batches: list[memoryview]
    ) -> None:
        """Publish to the listeners of an ephemeral stream."""
        check_topic(command.topic)
        if command.together or any(head(batch).flags & HAS_IDS for batch in batches):
            raise RequestError(
                "NOT_PERSISTENT", f"stream {stream.name!r} is ephemeral: it remembers no IDs"
            )
        if command.acks not in (p.QUORUM, p.NONE):
            raise RequestError(
                "NOT_PERSISTENT", f"stream {stream.name!r} is ephemeral: it has no replicas to ack"
            )
        count = sum(head(batch).count for batch in batches)
        if command.response:
            timeout = self._await_response(command, count)
            if self.node.events is not None:  # the name has to be free on all nodes
                reserved = partial(self._reserved, stream, command, batches)
                self.node.events.reserve(command.response, timeout, reserved)
                return
        self._deliver_ephemeral(stream, command, batches, count)

    def _deliver_ephemeral(
        self, stream: Ephemeral, command: p.Publish, batches: list[memoryview], count: int
    ) -> None:
        name = command.response
        routing = stream.exchange.publish(self, command.topic, count)
        if name and not routing.sent:
            self.node.responses.close(name)
            code = "CONSUMERS_BUSY" if routing.matched else "NO_CONSUMERS"
            self.respond(name, p.Response(code=code))
            return
        if self.node.events is not None:
            routing = self.node.events.scatter(command, batches, routing)
        deliver = p.Deliver(topic=command.topic, response=name)
        for send in routing.sends:
            chosen = slice_batches(batches, send.first, send.end, count)
            send.member.deliver(deliver, chosen, send.end - send.first)
        for loss in routing.losses:
            for member in loss.members:
                member.missed(loss.count)
        if not name:
            self.send(p.Published(request=command.request, matched=routing.matched))

    # ------------------------------------------------------------ responses

    def _await_response(self, command: p.Publish, count: int) -> int:
        """Register the response that a request waits for. Return its timeout in µs."""
        if count != 1:
            raise RequestError("BAD_REQUEST", f"a request is one message, not {count}")
        check_name(command.response)
        timeout = command.timeout or int(self.node.response_timeout_s() * SECOND)
        if timeout > MAX_TIMEOUT_US:
            raise RequestError(
                "BAD_REQUEST",
                f"a timeout of {timeout / SECOND:g} s is too long: at most a day (86400 s)",
            )
        name = command.response
        self.node.await_response(name, self, timeout)
        self._requests[name] = command.request
        return timeout

    def _reserved(
        self,
        stream: Ephemeral,
        command: p.Publish,
        batches: list[memoryview],
        error: RailgunError | None,
    ) -> None:
        """Publish a request if its response name was free on all nodes (`error` is None), or fail it."""
        name, node = command.response, self.node
        if node.responses.whose(name) is not self or self._requests.get(name) != command.request:
            return  # the request has ended meanwhile, and the client was told
        if error is None:
            self._deliver_ephemeral(stream, command, batches, 1)
            return
        node.responses.close(name)
        del self._requests[name]
        self._released(name)
        node.refused[getattr(error, "code", "BAD_REQUEST")] += 1
        self.fail(command.request, error)

    def _released(self, name: str) -> None:
        if self.node.events is not None:
            self.node.events.released(name)

    def expired(self, name: str) -> None:
        """Answer a request whose response has not come in time."""
        self.respond(name, p.Response(code="RS_TIMEOUT"))

    def respond(self, name: str, response: p.Response, blobs: Sequence[Blob] = ()) -> None:
        """Send the client the response to its request `name`."""
        response.request = self._requests.pop(name)
        self.send(response, blobs)
        self._released(name)

    def _respond(self, command: p.Respond, blob: Blob) -> None:
        if check(blob).count != 1:
            raise RequestError("BAD_REQUEST", "a response is one message")
        events = self.node.events
        if events is not None and command.response not in self.node.responses:
            answered = partial(self._responded, command.request) if command.request else None
            events.reply(command.response, blob, answered)
            return
        session = self.node.responses.answer(command.response)
        session.respond(command.response, p.Response(), [blob])
        self._responded(command.request, None)

    def _responded(self, request: int, error: RailgunError | None) -> None:
        if error is not None:
            self.fail(request, error)
        elif request:
            self.send(p.Responded(request=request))

    # ------------------------------------------------------------ consuming

    def _subscribe(self, channel: int, command: p.Subscribe) -> None:
        if not channel or channel in self.subscriptions:
            raise RequestError("BAD_CHANNEL", f"channel {channel} is taken: choose another")
        tracked = command.group.startswith(TRACKED)
        if command.group:
            check_group(command.group)
        refuse_hidden(command.stream)
        stream, name = self.node.get(command.stream), f"{self.name}/{channel}"
        if command.ack_wait > LONGEST_DELAY:
            raise RequestError("BAD_REQUEST", f"ack_wait is at most {LONGEST_DELAY // DAY} days")
        if not command.credit:
            raise RequestError("BAD_REQUEST", "the credit (prefetch) is 0; it must be at least 1")
        if isinstance(stream, Ephemeral):
            if tracked:
                raise RequestError(
                    "NOT_PERSISTENT",
                    f"stream {stream.name!r} is ephemeral: it keeps no positions, and has no tracked consumers, which "
                    f"is what {command.group!r} names. Leave the {TRACKED!r} out",
                )
            unsupported = [
                ("exclusive groups", command.exclusive),
                ("acks to wait for", command.ack_wait > 0),
                ("offsets", command.start == p.OFFSET),
            ]
            for what, is_requested in unsupported:
                if is_requested:
                    text = f"stream {stream.name!r} is ephemeral: it has no {what}"
                    raise RequestError("NOT_PERSISTENT", text)
            matcher = command.matcher if command.has_matcher else "#"
            listener = Listener(self, channel, stream, matcher, command.group or None)
            listener.grant(command.credit)
            self.subscriptions[channel] = listener
            self.send(p.Subscribed(request=command.request, why="end"), (), channel)
            return
        if command.exclusive and not command.group:
            raise RequestError("BAD_REQUEST", "exclusive is for members of a group: name a group")
        if command.has_matcher:
            raise RequestError(
                "NOT_EPHEMERAL", f"stream {stream.name!r} is persistent: it has no topics to match"
            )
        if tracked and not command.exclusive:
            raise RequestError(
                "BAD_REQUEST",
                f"the group {command.group!r}: names that begin with {TRACKED!r} are reserved for tracked consumers. "
                f"Choose another name, or subscribe as the consumer {command.group.removeprefix(TRACKED)!r} "
                "(consumer=…, railgun sub --consumer)",
            )
        identity = self.node.identity_of(stream)
        start: int | None = None if command.start == p.END else stream.log.first
        seek = command.offset if command.start == p.OFFSET else None
        if not command.group and seek is not None:
            self._check_position(stream, identity, command, seek)
        consumer = Consumer(self, channel, name, stream)
        self.subscriptions[channel] = consumer
        try:
            driver, joined = stream.subscribe(
                consumer,
                command.group,
                exclusive=command.exclusive,
                ack_wait=command.ack_wait,
                credit=0,
                start=start,
                seek=seek,
                token=command.token,
                again=command.again,
            )
        except RailgunError:
            del self.subscriptions[channel]
            raise
        why = {"tracked": "position", "sought": "offset"}.get(
            joined.why, "end" if command.start == p.END else "start"
        )
        subscribed = p.Subscribed(
            request=command.request,
            offset=joined.offset,
            why=why,
            persistent=True,
            identity=identity,
        )
        consumer.driver = driver

        def begin(error: RailgunError | None) -> None:
            # The subscription has ended meanwhile.
            if self.subscriptions.get(channel) is not consumer:
                self.fail(command.request, error or consumer.gone, channel)
                return
            if error is not None:
                del self.subscriptions[channel]
                consumer.leave(graceful=True)
                self.fail(command.request, error, channel)
                return
            self.send(subscribed, (), channel)
            consumer.begun = True
            driver.begin(name, command.credit)

        driver.when_saved(begin)

    def _check_position(
        self, stream: Persistent, identity: str, command: p.Subscribe, offset: int
    ) -> None:
        """Refuse a position of another stream of that name, or beyond this copy's end but perhaps stored by its
        master."""
        if command.identity and identity and command.identity != identity:
            raise StreamReplacedError(
                f"the stream {stream.name!r} was deleted and made anew: {offset} is a position in the old one. "
                "Begin anew with the new stream"
            )
        if offset > stream.end and (offset <= stream.log.end or not stream.acting):
            raise CopyBehindError(
                f"this copy of {stream.name!r} ends at {stream.end}, before the requested offset {offset}: try again"
            )

    def _grant(self, channel: int, credit: int) -> None:
        subscription = self._subscription(channel)
        if isinstance(subscription, Listener):
            subscription.grant(credit)
        else:
            assert subscription.driver is not None
            subscription.driver.begin(subscription.name, credit)

    def _ack_received(self, channel: int, command: p.Ack | p.Nack | p.InProgress) -> None:
        consumer = self._subscription(channel)
        if isinstance(consumer, Listener):
            consumer.stream.exchange.ack(consumer)  # raises the error: listeners have no acks
            return
        driver, request = consumer.driver, command.request
        assert driver is not None
        receipts = [
            Receipt(r.first, r.first + r.count, r.delivery, command.epoch) for r in command.ranges
        ]
        stale: list[Stale] = []

        def on_ack_stored(error: RailgunError | None) -> None:
            if not stale:  # otherwise it has been answered
                self._ack_stored(channel, request, error)

        on_stored: OnSaved | None = on_ack_stored if request else None
        match command:
            case p.Nack():
                stale += driver.nack(
                    consumer.name,
                    receipts,
                    command.delay,
                    command.reason,
                    on_stored,
                    block=command.block,
                )
            case p.InProgress():
                stale += driver.in_progress(consumer.name, receipts, on_stored)
            case _:
                stale += driver.ack(consumer.name, receipts, on_stored)
        if stale:
            first_stale = stale[0]
            rest_text = f", and {len(stale) - 1} others" if len(stale) > 1 else ""
            text = (
                f"messages {first_stale.first} to {first_stale.end - 1}, delivery {first_stale.delivery}{rest_text}, "
                "are no longer assigned to this consumer"
            )
            self.send(p.Failed(request=request, code=first_stale.code, text=text), (), channel)

    def _ack_stored(self, channel: int, request: int, error: RailgunError | None) -> None:
        if error is None:
            self.send(p.Acked(request=request), (), channel)
        else:
            self.fail(request, error, channel)

    def _subscription(self, channel: int) -> Consumer | Listener:
        subscription = self.subscriptions.get(channel)
        if subscription is None:
            raise RequestError("NO_SUBSCRIPTION", f"nothing is subscribed on channel {channel}")
        return subscription

    def lose(self, consumer: Consumer, error: Exception) -> None:
        """End a consumer's subscription because of `error`, and tell the client."""
        self.subscriptions.pop(consumer.channel, None)
        consumer.outbox.clear()
        if not consumer.going:  # otherwise the client was told before
            self.fail(0, error, consumer.channel)
        self.node.loop.call_soon(consumer.send_away)

    # ------------------------------------------------------------ everything else

    def _administer(self, command: p.Admin) -> None:
        async def work() -> None:
            self._calls += 1
            try:
                arguments = admin.arguments_of(command.arguments)
                result = await admin.call(self.node, command.call, arguments)
            except RailgunError as error:
                self.fail(command.request, error)
            else:
                self.send(p.Done(request=command.request, result=json.dumps(result)))
            finally:
                self._calls -= 1

        self.node.spawn(work())

    def moved(self, affected: Callable[[str], bool]) -> None:
        """Let members of groups subscribe again in the streams, for which `affected` is true, whose master has changed.

        `Routing.serves` already knows the new masters. A publish without an answer from the old master ends the
        connection.
        """
        for subscription in list(self.subscriptions.values()):
            if (
                not isinstance(subscription, Consumer)
                or not subscription.driver
                or not subscription.driver.tracked
            ):
                continue
            if affected(subscription.stream.name):
                self._move(subscription)
        if self._relay is not None:
            self._relay.moved(affected)

    def move_readers(self) -> None:
        """Let readers without a group subscribe again if another node serves their stream, as this copy cannot be
        written."""
        routing = self.node.routing
        if routing is None:
            return
        for subscription in list(self.subscriptions.values()):
            if (
                not isinstance(subscription, Consumer)
                or not subscription.driver
                or subscription.driver.tracked
            ):
                continue
            with contextlib.suppress(RailgunError):
                if isinstance(routing.serves(subscription.stream.name, write=False), There):
                    self._move(subscription, "cannot be written here, and is read elsewhere")

    def _move(self, consumer: Consumer, why: str = "has another master") -> None:
        """Let a consumer subscribe again, to be served by another node."""
        consumer.gone = NoMasterError(f"{consumer.stream.name!r} {why}: subscribe again")
        if consumer.begun:
            self.lose(consumer, consumer.gone)
        else:  # the Subscribe is answered when it would have begun
            self.subscriptions.pop(consumer.channel, None)
            self.node.loop.call_soon(consumer.send_away)

    def cut_off(self) -> None:
        """End the connection after all answers have gone out. The client will reconnect."""
        self._client_gone = False
        self.pause_reading(for_good=True)
        self.ended()
        self.paused = False  # a client that does not take the last data is silent
        self._outbox.flush()
        self.connection.close()

    def ended(self) -> None:
        """End the session, whose connection is gone, with its consumers and the responses it waits for."""
        client_gone = self._client_gone and not self._going
        if self._relay is not None:
            self._relay.ended(client_gone)
        for subscription in list(self.subscriptions.values()):
            if client_gone:
                subscription.leave(graceful=False)
            else:
                subscription.send_away()
        self.subscriptions.clear()
        for name in self.node.responses.gone(self):
            self._released(name)
