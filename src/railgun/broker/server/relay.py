"""Pass on the requests of a client that another node serves: its session opens a session of its own there.

Rules:

1. The node that serves a stream gets the frames about it unchanged, and its answers go back unchanged: request numbers
   and channels are the client's own. Only pings are answered here. A forwarded session is never forwarded again.
2. A frame that cannot be served now, because its stream has no master or there is no connection to it yet, waits for
   `master_wait` seconds in a line for that stream, together with all later frames for it. Then the whole line is
   refused with `NO_MASTER`: nothing of it was done. If there has been no quorum for longer than that, frames are
   refused at once. `describe` is answered from this node's copy then, if it has one.
3. Publishes to one stream do not overtake each other. When one is refused, so are those already on their way: a ping
   follows the refusal, and until its pong arrives all publishes to the stream are refused. The same holds between
   nodes: the pong goes back when this node refuses, too.
4. When a connection to another node breaks, the client's connection ends: the client reconnects, to any node, and does
   what it does after every lost connection. When the master of a stream changes, members of its groups subscribe
   again, and publishes wait until the old master has answered those before them; if it does not answer for
   `OLD_MASTER_ANSWER_S`, the client's connection ends.
5. What waits is bounded. A client that sends more than is taken is not read, and neither is a node that sends more
   than the client takes. Answers of nodes do not depend on being read, so the two never wait for each other.
6. A reader without a group at a position that this node's copy does not have (yet) is handed to the master. A reader
   that begins at the end begins at the end of the stream: the master is asked for that offset, and the copy serves the
   reader if it has reached the offset, or reaches it within `CATCH_UP_S`; otherwise the master serves it. Without a
   quorum no master can be asked, and the reader begins at the end of the copy.
7. A node that is about to end says so (`GoingAway`), and gets no more frames; what it refuses (`STOPPING`) goes back to
   the client, which sends it again. When its connection then ends nothing is in doubt, and the client stays connected.
8. When the client leaves, its sessions at other nodes end at once, after what the client has sent and a
   `GoingAway`. A session that ends without `GoingAway` has ended with this node or the connection to it: its consumers
   are not to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from railgun.broker.errors import NoMasterError, StoppingError
from railgun.broker.server.upstream import MAX_UNSENT_BYTES, Upstream, UpstreamError
from railgun.broker.streams import admin
from railgun.broker.streams.persistent import Persistent
from railgun.broker.streams.routing import Here, Nobody, Place, Routing, There
from railgun.errors import RailgunError
from railgun.transport.commands import NUMBERS, RawFrame
from railgun.transport.proto import streams_pb2 as p

if TYPE_CHECKING:
    from railgun.broker.server.session import Session

THIS_NODE: Final = ""
"""The place of this node, where other nodes have an ID."""
WAITING_FRAME_OVERHEAD_BYTES: Final = 512  # memory that a waiting frame takes besides its own bytes
OLD_MASTER_ANSWER_S: Final = 1.0  # time in which a former master answers the publishes it has got
DIAL_PAUSES_S: Final = (0.05, 0.5)  # pause before the next attempt to connect: first, and longest
CATCH_UP_S: Final = 0.5  # time that a copy has to reach the end offset that its master has reported
PUBLISH: Final = NUMBERS[p.Publish]
SUBSCRIBE: Final = NUMBERS[p.Subscribe]
UNSUBSCRIBE: Final = NUMBERS[p.Unsubscribe]
ADMIN: Final = NUMBERS[p.Admin]
PONG: Final = NUMBERS[p.Pong]
PUBLISHED: Final = NUMBERS[p.Published]
FAILED: Final = NUMBERS[p.Failed]
DELIVER: Final = NUMBERS[p.Deliver]
SUBSCRIBED: Final = NUMBERS[p.Subscribed]
UNSUBSCRIBED: Final = NUMBERS[p.Unsubscribed]
CHANNEL_KINDS: Final = frozenset(
    NUMBERS[kind] for kind in (p.Ack, p.Nack, p.InProgress, p.Grant, p.Unsubscribe)
)
_LOG: Final = logging.getLogger(__name__)


class _Key(NamedTuple):
    """Key of one line of waiting frames: the stream, and whether they need its master."""

    stream: str
    write: bool
    at_end: int = 0
    """The channel of a reader that begins at the end, or 0. Such a reader has a line of its own, because other
    frames need not wait until the master reports that offset."""


class BadChannelError(RailgunError):
    """The channel of a new subscription is taken."""

    code = "BAD_CHANNEL"


@dataclass(slots=True)
class _StreamFrame:
    """A frame about a stream. `command` is None for a frame about a subscription that itself waits in a line."""

    raw: RawFrame
    command: Any
    key: _Key
    deadline: float
    end: int | None = None
    """The end offset that the master has reported for this reader, or None."""
    caught_up_by: float = 0.0
    """The time until which this node's copy may catch up to `end`."""

    @property
    def size(self) -> int:
        return len(self.raw.data) + WAITING_FRAME_OVERHEAD_BYTES


@dataclass(slots=True)
class _Channel:
    """A subscription that is not served here: it waits in a line, or belongs to another node."""

    key: _Key
    request: int
    upstream: Upstream | None = None
    begun: bool = False
    leaving: bool = False
    owed: int = 0
    """The number of Unsubscribe commands that are not answered yet."""


@dataclass(slots=True)
class _Busy:
    """Count of a stream's unanswered publishes, and the node that they went to."""

    where: str
    count: int = 0


class Relay:
    """The frames, subscriptions and connections that one session passes on to other nodes."""

    def __init__(self, session: Session, routing: Routing) -> None:
        self._session = session
        self._routing = routing
        self._loop = session.node.loop
        self._lines: dict[_Key, deque[_StreamFrame]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._upstreams: dict[str, Upstream] = {}
        self._channels: dict[int, _Channel] = {}
        self._busy: dict[str, _Busy] = {}
        # By stream: the ping after whose pong publishes are taken again.
        self._refusing: dict[str, int] = {}
        self._pings = 0
        self._over = False

    # ------------------------------------------------------------ from the client

    def take(self, raw: RawFrame) -> None:
        """Serve a frame from the client, here or at another node, or let it wait."""
        if self._over:
            return
        kind = raw.kind
        if kind in CHANNEL_KINDS:
            self._on_channel(raw)
        elif kind == PUBLISH:
            command = raw.command()
            self._take_stream_frame(raw, command, _Key(command.stream, True))
        elif kind == SUBSCRIBE:
            command = raw.command()
            by_master = bool(command.group) or self._behind(command)
            at_end = raw.channel if command.start == p.END and not by_master else 0
            self._take_stream_frame(raw, command, _Key(command.stream, by_master, at_end))
        elif (
            kind == ADMIN
            and (stream_name := self._stream_of_call(command := raw.command())) is not None
        ):
            self._take_stream_frame(raw, command, _Key(stream_name, True))
        elif kind == PONG:
            self._pong_received(raw.command().number)
        else:
            self._session.take(raw.frame())

    def _behind(self, command: p.Subscribe) -> bool:
        """Return whether this node's copy lacks the position of a reader without a group, so that the master has to
        serve it."""
        local_stream = self._session.node.streams.get(command.stream)
        if not isinstance(local_stream, Persistent) or command.start != p.OFFSET:
            return False
        identity = self._session.node.identity_of(local_stream)
        is_replaced = bool(command.identity and identity and command.identity != identity)
        return is_replaced or command.offset > local_stream.end

    def _stream_of_call(self, command: p.Admin) -> str | None:
        """Return the stream whose master has to answer a call, or None if this node answers, even if only to refuse
        it."""
        if command.call not in admin.OF_MASTER:
            return None
        with contextlib.suppress(RailgunError):
            name = admin.arguments_of(command.arguments).get("name")
            return name if isinstance(name, str) else None
        return None

    def _take_stream_frame(self, raw: RawFrame, command: Any, key: _Key) -> None:
        if self._session.going:
            error_text = "this node is about to end; nothing was done: ask another node"
            self._fail(raw, command, StoppingError(error_text))
            return
        if raw.kind == PUBLISH and key.stream in self._refusing:
            self._fail(raw, command, _refusal(key.stream))
            return
        if raw.kind == SUBSCRIBE and self._is_channel_taken(raw.channel):
            error_text = f"channel {raw.channel} is taken: choose another"
            self._fail(raw, command, BadChannelError(error_text))
            return
        waiting = _StreamFrame(raw, command, key, self._loop.time() + self._routing.master_wait)
        line = self._lines.get(key)
        if line is not None:
            self._line_up(line, waiting)
        elif not self._serve(waiting):
            line = self._lines[key] = deque()
            self._line_up(line, waiting)
            task = self._loop.create_task(self._wait(key, line))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _is_channel_taken(self, channel: int) -> bool:
        existing = self._channels.get(channel)
        is_used = existing is not None and not existing.leaving
        return not channel or is_used or channel in self._session.subscriptions

    def _on_channel(self, raw: RawFrame) -> None:
        channel = self._channels.get(raw.channel)
        if channel is None:
            self._session.take(raw.frame())
        elif channel.upstream is None:
            channel.leaving = channel.leaving or raw.kind == UNSUBSCRIBE
            line = self._lines[channel.key]
            self._line_up(line, _StreamFrame(raw, None, channel.key, line[-1].deadline))
        else:
            if raw.kind == UNSUBSCRIBE:
                channel.leaving = True
                channel.owed += 1
            self._pass_on(raw, channel.upstream)

    def _pass_on(self, raw: RawFrame, upstream: Upstream) -> None:
        upstream.send(raw.data)
        if upstream.unsent >= MAX_UNSENT_BYTES:
            self._session.pause_reading()

    @property
    def full(self) -> bool:
        """Whether another node does not take frames as fast as the client sends them."""
        return any(upstream.unsent >= MAX_UNSENT_BYTES for upstream in self._upstreams.values())

    # ------------------------------------------------------------ here, there, or not yet

    def _serve(self, waiting: _StreamFrame) -> bool:
        """Serve a frame, or refuse it. Return False if it has to wait."""
        if waiting.command is None:  # its subscription has left the line before it
            self._on_channel(waiting.raw)
            return True
        try:
            place = self._place(waiting)
        except RailgunError as error:
            self._fail(waiting.raw, waiting.command, error)
            return True
        match place:
            case Here():
                if self._follows_unanswered(waiting, THIS_NODE):
                    return False
                self._serve_here(waiting)
            case There() if self._session.forwarded:
                self._refuse([waiting])
            case There():
                upstream = self._upstreams.get(place.node)
                if upstream is None or not upstream.open or upstream.going:
                    return False
                if self._follows_unanswered(waiting, place.node):
                    return False
                self._forward(waiting, upstream)
            case Nobody() if place.hopeless:
                self._refuse([waiting])
            case Nobody():
                return False
        return True

    def _place(self, waiting: _StreamFrame) -> Place:
        """Return the place that serves `waiting`. Raise the errors of `Routing.serves`."""
        key = waiting.key
        place = self._routing.serves(key.stream, key.write)
        local_stream = self._session.node.streams.get(key.stream)
        if (
            not key.at_end
            or not isinstance(place, Here)
            or not isinstance(local_stream, Persistent)
        ):
            return place
        try:
            master_place = self._routing.serves(key.stream, True)
        except RailgunError:  # this node is the master, and cannot write: no other copy is further
            return place
        if isinstance(master_place, Here) or (
            isinstance(master_place, Nobody) and master_place.hopeless
        ):
            return place
        if waiting.end is None:
            return Nobody(NoMasterError("its master has not reported its end yet"))
        if local_stream.end >= waiting.end:
            return place
        if self._session.forwarded or self._loop.time() < waiting.caught_up_by:
            return Nobody(
                NoMasterError(
                    f"this copy ends at {local_stream.end}, and the stream at {waiting.end}"
                )
            )
        return master_place

    def _follows_unanswered(self, waiting: _StreamFrame, where: str) -> bool:
        """Return whether `waiting` is a publish that has to wait for earlier ones, unanswered at a node other than
        `where`."""
        busy = self._busy.get(waiting.key.stream)
        return waiting.raw.kind == PUBLISH and busy is not None and busy.where != where

    def _serve_here(self, waiting: _StreamFrame) -> None:
        if waiting.raw.kind == SUBSCRIBE:
            self._channels.pop(waiting.raw.channel, None)
        self._session.take(waiting.raw.frame())

    def _forward(self, waiting: _StreamFrame, upstream: Upstream) -> None:
        raw, command = waiting.raw, waiting.command
        if raw.kind == PUBLISH:
            upstream.publishes[command.request] = command.stream
            self.published(command.stream, upstream.node)
        elif raw.kind == SUBSCRIBE:
            before = self._channels.get(raw.channel)
            same = before is not None and before.upstream is upstream
            owed = before.owed if before is not None and same else 0
            self._channels[raw.channel] = _Channel(
                waiting.key, command.request, upstream, owed=owed
            )
        self._pass_on(raw, upstream)

    def published(self, stream: str, where: str = THIS_NODE) -> None:
        """Note that a publish to `stream` was taken at `where`."""
        busy = self._busy.get(stream)
        if busy is None:
            busy = self._busy[stream] = _Busy(where)
        busy.count += 1

    def answered(self, stream: str) -> None:
        """Note that a publish to `stream` was answered."""
        busy = self._busy.get(stream)
        if busy is not None:
            busy.count -= 1
            if busy.count <= 0:
                del self._busy[stream]

    # ------------------------------------------------------------ waiting

    def _line_up(self, line: deque[_StreamFrame], waiting: _StreamFrame) -> None:
        if waiting.raw.kind == SUBSCRIBE:
            self._channels[waiting.raw.channel] = _Channel(waiting.key, waiting.command.request)
        waiting.raw = waiting.raw.kept()
        line.append(waiting)
        self._session.add_unstored(waiting.size)

    async def _wait(self, key: _Key, line: deque[_StreamFrame]) -> None:
        """Serve the frames of a line in order, as soon as possible. Refuse them all at their deadline.

        The line may already be refused, and empty, when this coroutine begins.
        """
        pause = DIAL_PAUSES_S[0]
        while line and not self._over:
            if line[0].deadline <= self._loop.time() or not self._serve_first(line):
                left = line[0].deadline - self._loop.time()
                if left <= 0:
                    self._give_up(line)
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        pause = await self._wait_for_change(line[0], pause)
        if self._lines.get(key) is line:
            del self._lines[key]

    def _serve_first(self, line: deque[_StreamFrame]) -> bool:
        first = line[0]
        if not self._serve(first):
            return False
        self._leave_line(first)
        if line:  # otherwise the session has ended and the line was refused
            line.popleft()
            self._session.remove_unstored(first.size)
        return True

    def _leave_line(self, waiting: _StreamFrame) -> None:
        channel = self._channels.get(waiting.raw.channel)
        if waiting.raw.kind == SUBSCRIBE and channel is not None and channel.upstream is None:
            del self._channels[waiting.raw.channel]

    async def _wait_for_change(self, waiting: _StreamFrame, pause: float) -> float:
        """Wait until `waiting` may be served differently. Return the pause after the next failed connection, in
        seconds."""
        key = waiting.key
        place = self._where(waiting)
        if key.at_end and isinstance(place, Nobody):
            return await self._find_end(waiting, pause)
        key_of_master = (key.stream, key.write or bool(key.at_end))
        busy = self._busy.get(key.stream)
        there = place.node if isinstance(place, There) else THIS_NODE
        if busy is not None and busy.where != there and not isinstance(place, Nobody):
            await asyncio.sleep(DIAL_PAUSES_S[0])  # until the earlier publishes are answered
            return DIAL_PAUSES_S[0]
        if not isinstance(place, There):
            await self._routing.wait(*key_of_master)
            return DIAL_PAUSES_S[0]
        upstream = self._upstreams.get(place.node)
        if upstream is None or upstream.address != (place.host, place.port):
            if upstream is not None:
                upstream.close()
            upstream = self._upstreams[place.node] = Upstream(self, self._session, place)
        if upstream.going:  # the stream will move to another node, or this one comes back
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DIAL_PAUSES_S[0]):
                    await self._routing.wait(*key_of_master)
            return DIAL_PAUSES_S[0]
        changed = self._loop.create_task(self._routing.wait(*key_of_master))
        try:
            await asyncio.wait([changed, upstream.dialling], return_when=asyncio.FIRST_COMPLETED)
            upstream.check()
            return DIAL_PAUSES_S[0]
        except UpstreamError as error:
            if self._upstreams.get(place.node) is upstream:
                del self._upstreams[place.node]
                if error.refused:
                    _LOG.warning(
                        "node %s at %s:%d refuses this node: %s", *_address_of(place), error
                    )
        finally:
            changed.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._routing.wait(*key_of_master)
        return min(2 * pause, DIAL_PAUSES_S[1])

    async def _find_end(self, waiting: _StreamFrame, pause: float) -> float:
        """Ask the master for the end of the stream, or let this node's copy reach it. Return the next pause in
        seconds."""
        stream = waiting.key.stream
        if waiting.end is not None:
            await asyncio.sleep(DIAL_PAUSES_S[0])
            return DIAL_PAUSES_S[0]
        waiting.end = await self._routing.end(stream)
        if waiting.end is not None:
            waiting.caught_up_by = self._loop.time() + CATCH_UP_S
            return DIAL_PAUSES_S[0]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._routing.wait(stream, True)
        return min(2 * pause, DIAL_PAUSES_S[1])

    def _where(self, waiting: _StreamFrame) -> Place:
        try:
            return self._place(waiting)
        except RailgunError as error:
            return Nobody(error)

    def _give_up(self, line: deque[_StreamFrame]) -> None:
        """Refuse all frames of a line, which no node has served in time."""
        frames = list(line)
        line.clear()
        key = frames[0].key
        if self._lines.get(key) is line:
            del self._lines[key]
        for waiting in frames:
            self._leave_line(waiting)
        self._refuse([waiting for waiting in frames if waiting.command is not None])
        for waiting in frames:
            if waiting.command is None:
                self._session.take(waiting.raw.frame())
        self._session.remove_unstored(sum(waiting.size for waiting in frames))

    def give_up(self) -> None:
        """Refuse all waiting frames because this node is about to end: the client sends them to another node."""
        for line in list(self._lines.values()):
            if line:
                self._give_up(line)

    # ------------------------------------------------------------ refusing

    def _refuse(self, frames: list[_StreamFrame]) -> None:
        for waiting in frames:
            stream, write = waiting.key.stream, waiting.key.write or bool(waiting.key.at_end)
            if self._can_answer_here(waiting):
                self._session.take(waiting.raw.frame())
                continue
            why = _refusal(stream, write)
            with contextlib.suppress(RailgunError):
                place = self._place(waiting)
                if isinstance(place, Nobody):
                    why = _refusal(stream, write, place.why, place.hopeless)
            self._fail(waiting.raw, waiting.command, why)
        for stream in {waiting.key.stream for waiting in frames if waiting.raw.kind == PUBLISH}:
            self._refuse_more(stream)

    def _can_answer_here(self, waiting: _StreamFrame) -> bool:
        """Return whether this node can answer from its copy, as it serves readers, though it is not the master."""
        if waiting.raw.kind != ADMIN or waiting.command.call not in admin.OF_COPY:
            return False
        return not self._session.forwarded and waiting.key.stream in self._session.node.streams

    def was_refused(self, stream: str) -> None:
        """Refuse the publishes behind one that was taken and then refused, so that none overtakes it when it is sent
        again."""
        self._refuse_more(stream)
        behind = self._lines.get(_Key(stream, True))
        if behind:  # what waits in the line came after the refused publish
            self._give_up(behind)

    def _refuse_more(self, stream: str) -> None:
        """Refuse publishes to `stream` until the client has confirmed, by a pong, that it saw the refusal."""
        self._pings += 1
        self._refusing[stream] = self._pings
        self._session.send(p.Ping(number=self._pings))

    def _pong_received(self, number: int) -> None:
        self._session.confirmed(number)
        for stream, last in list(self._refusing.items()):
            if last <= number:
                del self._refusing[stream]

    def _fail(self, raw: RawFrame, command: Any, error: RailgunError) -> None:
        if raw.kind == PUBLISH:
            self._session.node.refused[getattr(error, "code", "BAD_REQUEST")] += 1
        self._session.fail(command.request, error, raw.channel)

    # ------------------------------------------------------------ from other nodes

    def frame_received(self, upstream: Upstream, raw: RawFrame) -> None:
        """Take a frame from another node, and pass it on to the client."""
        kind, channel = raw.kind, self._channels.get(raw.channel) if raw.channel else None
        if channel is not None and channel.upstream is not upstream and kind != UNSUBSCRIBED:
            return  # it belongs to a subscription that has ended
        if channel is None and kind == DELIVER:
            return  # as above
        if kind == PUBLISHED:
            self._publish_answered(upstream, raw.command().request)
        elif kind == FAILED:
            command = raw.command()
            stream = self._publish_answered(upstream, command.request)
            if channel is not None and not channel.begun and command.request == channel.request:
                del self._channels[raw.channel]
            self._session.pass_back(raw.data)
            if stream is not None and command.code in (NoMasterError.code, StoppingError.code):
                self.was_refused(stream)
            return
        elif channel is not None and kind == SUBSCRIBED:
            channel.begun = True
        elif channel is not None and kind == UNSUBSCRIBED and channel.upstream is upstream:
            if channel.owed:
                channel.owed -= 1
            if channel.leaving and not channel.owed:
                del self._channels[raw.channel]
        self._session.pass_back(raw.data)

    def _publish_answered(self, upstream: Upstream, request: int) -> str | None:
        stream = upstream.publishes.pop(request, None)
        if stream is not None:
            self.answered(stream)
        return stream

    def resume_client(self) -> None:
        """Resume reading the client, now that another node has taken what waited for it."""
        self._session.resume_reading()

    def resume_upstreams(self) -> None:
        """Resume reading other nodes, now that the client has taken what waited for it."""
        for upstream in self._upstreams.values():
            upstream.read()

    def upstream_lost(self, upstream: Upstream) -> None:
        """Handle a broken connection to another node. If that node has ended in order, nothing is in doubt."""
        if self._over:
            return
        if not upstream.going or upstream.publishes:
            self._session.cut_off()
            return
        if self._upstreams.get(upstream.node) is upstream:
            del self._upstreams[upstream.node]
        stopped = StoppingError(f"node {upstream.node} has ended: subscribe again")
        for number, channel in list(self._channels.items()):
            if channel.upstream is upstream:
                self._lose(number, channel, stopped)

    @property
    def busy(self) -> bool:
        """Whether publishes of the client are unanswered, or wait in a line."""
        return bool(self._busy or self._lines)

    @property
    def consumes(self) -> bool:
        """Whether the client is a member of groups at other nodes."""
        return any(channel.begun and channel.key.write for channel in self._channels.values())

    # ------------------------------------------------------------ moving, ending

    def moved(self, affected: Callable[[str], bool]) -> None:
        """Let members of groups subscribe again where the master of a stream for which `affected` is true has changed.

        A former master that lives answers the publishes it has got, as stored or as refused. If it is silent for
        `OLD_MASTER_ANSWER_S` their outcome is unknown, and the client is cut off.
        """
        for number, channel in list(self._channels.items()):
            stream = channel.key.stream
            if channel.upstream is None or not channel.key.write or not affected(stream):
                continue
            if not self._is_still_master(stream, channel.upstream.node):
                elsewhere = NoMasterError(f"{stream!r} has another master: subscribe again")
                self._lose(number, channel, elsewhere)
        for stream, busy in self._busy.items():
            if affected(stream) and not self._is_still_master(stream, busy.where):
                self._loop.call_later(OLD_MASTER_ANSWER_S, self._check_answered, stream, busy)

    def _check_answered(self, stream: str, busy: _Busy) -> None:
        """Cut the client off if a former master has not answered its publishes."""
        hangs = self._busy.get(stream) is busy and not self._is_still_master(stream, busy.where)
        if hangs and not self._over:
            self._session.cut_off()

    def _lose(self, channel_number: int, channel: _Channel, error: RailgunError) -> None:
        """End a subscription that another node serves, and tell the client, which may subscribe again."""
        del self._channels[channel_number]
        if not channel.leaving:
            self._session.fail(0 if channel.begun else channel.request, error, channel_number)

    def _is_still_master(self, stream: str, where: str) -> bool:
        if where == THIS_NODE:
            return False
        with contextlib.suppress(RailgunError):
            place = self._routing.serves(stream, True)
            return isinstance(place, There) and place.node == where
        return False

    def ended(self, client_gone: bool) -> None:
        """End all sessions at other nodes. If `client_gone`, tell those nodes that the client has left."""
        self._over = True
        for task in self._tasks:
            task.cancel()
        for line in self._lines.values():
            line.clear()
        self._lines.clear()
        self._channels.clear()
        for upstream in self._upstreams.values():
            if client_gone:
                upstream.client_gone()
            upstream.close()
        self._upstreams.clear()


def _address_of(place: There) -> tuple[str, str, int]:
    return place.node, place.host, place.port


def _refusal(
    stream: str, write: bool = True, why: Exception | None = None, no_quorum: bool = False
) -> NoMasterError:
    what = "no master" if write else "no copy that can be reached"
    more = f" ({why})" if why is not None else ""
    text = f"the stream {stream!r} has {what} now{more}; nothing was stored or changed: try again"
    return NoMasterError(text, no_quorum)
