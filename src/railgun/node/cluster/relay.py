"""What a client asks for and another node serves: its session gets a session of its own there.

Rules:

1. Whoever serves a stream gets the frames that are about it as they came, and its answers go back as they came: numbers
   and channels are the client's own. Only pings are answered here. A session that was passed on is not passed on again.
2. What cannot be served now, because there is no master or no connection to it yet, waits in a line of its own for each
   stream, with all that follows for it, for `master_wait` seconds. Then the whole line is refused with `NO_MASTER`:
   nothing of it was done.
3. Publishes of a stream do not overtake each other. When one was refused, so are those that were on their way: a ping
   goes after the refusal, and until its pong comes all publishes of the stream are refused. So is it between nodes:
   the pong goes back when this node refuses, too.
4. A connection to another node that breaks ends the client's: it begins anew, at any node, and does what it does after
   every lost connection. So does a place that changes while something hangs on it: unanswered publishes, members.
5. What waits is bounded. A client that sends more than is taken is not read, and neither is a node that sends more than
   the client takes. Answers of nodes do not depend on being read, so the two never wait for each other.
6. When the client goes, its sessions elsewhere go at once, after what it has sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from railgun.core.errors import RailgunError
from railgun.node import admin
from railgun.node.cluster.upstream import ROOM, Upstream, UpstreamError
from railgun.node.errors import NoMasterError
from railgun.node.routing import Here, Nobody, Place, Routing, There
from railgun.wire.commands import NUMBERS, RawFrame
from railgun.wire.proto import streams_pb2 as p

if TYPE_CHECKING:
    from railgun.node.session import Session

HERE: Final = ""
"""This node, where others have an id."""
PER_FRAME: Final = 512  # bytes that a frame takes besides its own while it waits
AGAIN: Final = (0.05, 0.5)  # seconds to the next try to connect: at first, and at most
PUBLISH: Final = NUMBERS[p.Publish]
SUBSCRIBE: Final = NUMBERS[p.Subscribe]
UNSUBSCRIBE: Final = NUMBERS[p.Unsubscribe]
ADMIN: Final = NUMBERS[p.Admin]
PONG: Final = NUMBERS[p.Pong]
PUBLISHED: Final = NUMBERS[p.Published]
FAILED: Final = NUMBERS[p.Failed]
SUBSCRIBED: Final = NUMBERS[p.Subscribed]
UNSUBSCRIBED: Final = NUMBERS[p.Unsubscribed]
ON_A_CHANNEL: Final = frozenset(
    NUMBERS[kind] for kind in (p.Ack, p.Nack, p.InProgress, p.Grant, p.Unsubscribe)
)
_LOG: Final = logging.getLogger(__name__)
_Key = tuple[str, bool]


class BadChannelError(RailgunError):
    """A channel that is taken."""

    code = "BAD_CHANNEL"


@dataclass(slots=True)
class _Asked:
    """A frame about a stream; `command` is None where it is about a subscription that waits itself."""

    raw: RawFrame
    command: Any
    key: _Key
    deadline: float

    @property
    def size(self) -> int:
        return len(self.raw.data) + PER_FRAME


@dataclass(slots=True)
class _Channel:
    """A subscription that is not served here: it waits in a line, or belongs to another node."""

    key: _Key
    request: int
    upstream: Upstream | None = None
    begun: bool = False
    leaving: bool = False
    owed: int = 0
    """Unsubscribes that were not answered."""


@dataclass(slots=True)
class _Busy:
    """Publishes of a stream that were not answered, and where they are."""

    where: str
    count: int = 0


class Relay:
    """What one session passes on."""

    def __init__(self, session: Session, routing: Routing) -> None:
        self._session = session
        self._routing = routing
        self._loop = session.node.loop
        self._lines: dict[_Key, deque[_Asked]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._upstreams: dict[str, Upstream] = {}
        self._channels: dict[int, _Channel] = {}
        self._busy: dict[str, _Busy] = {}
        self._refusing: dict[str, int] = {}  # streams, until this ping is answered
        self._pings = 0
        self._over = False

    # ------------------------------------------------------------ from the client

    def take(self, raw: RawFrame) -> None:
        """A frame has come."""
        if self._over:
            return
        kind = raw.kind
        if kind in ON_A_CHANNEL:
            self._on_channel(raw)
        elif kind == PUBLISH:
            command = raw.command()
            self._by_stream(raw, command, (command.stream, True))
        elif kind == SUBSCRIBE:
            command = raw.command()
            self._by_stream(raw, command, (command.stream, bool(command.group)))
        elif kind == ADMIN and (named := self._named(command := raw.command())) is not None:
            self._by_stream(raw, command, (named, True))
        elif kind == PONG:
            self._seen(raw.command().number)
        else:
            self._session.take(raw.frame())

    def _named(self, command: p.Admin) -> str | None:
        """The stream whose master a call is for; None: this node answers, be it that it makes no sense."""
        if command.call not in admin.OF_MASTER:
            return None
        with contextlib.suppress(RailgunError):
            name = admin.arguments_of(command.arguments).get("name")
            return name if isinstance(name, str) else None
        return None

    def _by_stream(self, raw: RawFrame, command: Any, key: _Key) -> None:
        if raw.kind == PUBLISH and key[0] in self._refusing:
            self._fail(raw, command, _refusal(key[0]))
            return
        if raw.kind == SUBSCRIBE and self._taken(raw.channel):
            told = f"channel {raw.channel} is taken: choose another"
            self._fail(raw, command, BadChannelError(told))
            return
        asked = _Asked(raw, command, key, self._loop.time() + self._routing.master_wait)
        line = self._lines.get(key)
        if line is not None:
            self._line_up(line, asked)
        elif not self._go(asked):
            line = self._lines[key] = deque()
            self._line_up(line, asked)
            task = self._loop.create_task(self._wait(line))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _taken(self, channel: int) -> bool:
        found = self._channels.get(channel)
        elsewhere = found is not None and not found.leaving
        return not channel or elsewhere or channel in self._session.subscriptions

    def _on_channel(self, raw: RawFrame) -> None:
        channel = self._channels.get(raw.channel)
        if channel is None:
            self._session.take(raw.frame())
        elif channel.upstream is None:
            line = self._lines[channel.key]
            self._line_up(line, _Asked(raw, None, channel.key, line[-1].deadline))
        else:
            if raw.kind == UNSUBSCRIBE:
                channel.leaving = True
                channel.owed += 1
            self._pass_on(raw, channel.upstream)

    def _pass_on(self, raw: RawFrame, upstream: Upstream) -> None:
        upstream.send(raw.data)
        if upstream.unsent >= ROOM:
            self._session.rest()

    @property
    def full(self) -> bool:
        """Whether another node does not take what the client sends."""
        return any(upstream.unsent >= ROOM for upstream in self._upstreams.values())

    # ------------------------------------------------------------ here, there, or not yet

    def _go(self, asked: _Asked) -> bool:
        """Let it be served; False: it has to wait."""
        if asked.command is None:  # the subscription it is about has gone before it
            self._on_channel(asked.raw)
            return True
        try:
            place = self._routing.serves(*asked.key)
        except RailgunError as error:
            self._fail(asked.raw, asked.command, error)
            return True
        match place:
            case Here():
                self._here(asked)
            case There() if self._session.forwarded:
                self._refuse([asked])
            case There():
                upstream = self._upstreams.get(place.node)
                if upstream is None or not upstream.open:
                    return False
                self._there(asked, upstream)
            case Nobody():
                return False
        return True

    def _stays(self, asked: _Asked, where: str) -> bool:
        """Whether it goes where those before it went."""
        busy = self._busy.get(asked.key[0])
        if asked.raw.kind == PUBLISH and busy is not None and busy.where != where:
            line = self._lines.get(asked.key)
            if not line or line[0] is not asked:  # else it is refused with its line
                self._fail(asked.raw, asked.command, _refusal(asked.key[0]))
            self._session.cut_off()
            return False
        return True

    def _here(self, asked: _Asked) -> None:
        if self._stays(asked, HERE):
            if asked.raw.kind == SUBSCRIBE:
                self._channels.pop(asked.raw.channel, None)
            self._session.take(asked.raw.frame())

    def _there(self, asked: _Asked, upstream: Upstream) -> None:
        if not self._stays(asked, upstream.node):
            return
        raw, command = asked.raw, asked.command
        if raw.kind == PUBLISH:
            upstream.publishes[command.request] = command.stream
            self.published(command.stream, upstream.node)
        elif raw.kind == SUBSCRIBE:
            before = self._channels.get(raw.channel)
            same = before is not None and before.upstream is upstream
            owed = before.owed if before is not None and same else 0
            self._channels[raw.channel] = _Channel(asked.key, command.request, upstream, owed=owed)
        self._pass_on(raw, upstream)

    def published(self, stream: str, where: str = HERE) -> None:
        """A publish was taken."""
        busy = self._busy.get(stream)
        if busy is None:
            busy = self._busy[stream] = _Busy(where)
        busy.count += 1

    def answered(self, stream: str) -> None:
        """And answered."""
        busy = self._busy.get(stream)
        if busy is not None:
            busy.count -= 1
            if busy.count <= 0:
                del self._busy[stream]

    # ------------------------------------------------------------ waiting

    def _line_up(self, line: deque[_Asked], asked: _Asked) -> None:
        if asked.raw.kind == SUBSCRIBE:
            self._channels[asked.raw.channel] = _Channel(asked.key, asked.command.request)
        asked.raw = asked.raw.kept()
        line.append(asked)
        self._session.hold_back(asked.size)

    async def _wait(self, line: deque[_Asked]) -> None:
        """Let those in a line go as soon as they can, in order; refuse them when it takes too long."""
        key, pause = line[0].key, AGAIN[0]
        while line and not self._over:
            if line[0].deadline <= self._loop.time() or not self._let_go(line):
                left = line[0].deadline - self._loop.time()
                if left <= 0:
                    self._give_up(line)
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        pause = await self._change(key, pause)
        if self._lines.get(key) is line:
            del self._lines[key]

    def _let_go(self, line: deque[_Asked]) -> bool:
        first = line[0]
        if not self._go(first):
            return False
        self._waits_no_more(first)
        if line:  # else the session is over, and the line was refused
            line.popleft()
            self._session.let_go(first.size)
        return True

    def _waits_no_more(self, asked: _Asked) -> None:
        found = self._channels.get(asked.raw.channel)
        if asked.raw.kind == SUBSCRIBE and found is not None and found.upstream is None:
            del self._channels[asked.raw.channel]

    async def _change(self, key: _Key, pause: float) -> float:
        """Until something may be another way; how long to wait when a connection cannot be made."""
        place = self._where(key)
        if not isinstance(place, There):
            await self._routing.wait(*key)
            return AGAIN[0]
        upstream = self._upstreams.get(place.node)
        if upstream is None or upstream.address != (place.host, place.port):
            if upstream is not None:
                upstream.close()
            upstream = self._upstreams[place.node] = Upstream(self, self._session, place)
        changed = self._loop.create_task(self._routing.wait(*key))
        try:
            await asyncio.wait([changed, upstream.dialling], return_when=asyncio.FIRST_COMPLETED)
            upstream.check()
            return AGAIN[0]
        except UpstreamError as error:
            if self._upstreams.get(place.node) is upstream:
                del self._upstreams[place.node]
                if error.refused:
                    _LOG.warning("node %s at %s:%d refuses us: %s", *_named(place), error)
        finally:
            changed.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._routing.wait(*key)
        return min(2 * pause, AGAIN[1])

    def _where(self, key: _Key) -> Place:
        try:
            return self._routing.serves(*key)
        except RailgunError as error:
            return Nobody(error)

    def _give_up(self, line: deque[_Asked]) -> None:
        """Nobody came who could serve it: refuse all of it."""
        every = list(line)
        line.clear()
        key = every[0].key
        if self._lines.get(key) is line:
            del self._lines[key]
        for asked in every:
            self._waits_no_more(asked)
        self._refuse([asked for asked in every if asked.command is not None])
        for asked in every:
            if asked.command is None:
                self._session.take(asked.raw.frame())
        self._session.let_go(sum(asked.size for asked in every))

    def give_up(self) -> None:
        """This node is about to end: whoever waits tries it elsewhere."""
        for line in list(self._lines.values()):
            if line:
                self._give_up(line)

    # ------------------------------------------------------------ refusing

    def _refuse(self, every: list[_Asked]) -> None:
        for asked in every:
            stream, write = asked.key
            why = _refusal(stream, write)
            with contextlib.suppress(RailgunError):
                place = self._routing.serves(stream, write)
                if isinstance(place, Nobody):
                    why = _refusal(stream, write, place.why)
            self._fail(asked.raw, asked.command, why)
        for stream in {asked.key[0] for asked in every if asked.raw.kind == PUBLISH}:
            self._refuse_more(stream)

    def _refuse_more(self, stream: str) -> None:
        """Refuse publishes until the client has seen that one was."""
        self._pings += 1
        self._refusing[stream] = self._pings
        self._session.send(p.Ping(number=self._pings))

    def _seen(self, number: int) -> None:
        for stream, last in list(self._refusing.items()):
            if last <= number:
                del self._refusing[stream]

    def _fail(self, raw: RawFrame, command: Any, error: RailgunError) -> None:
        if raw.kind == PUBLISH:
            self._session.node.refused[getattr(error, "code", "BAD_REQUEST")] += 1
        self._session.fail(command.request, error, raw.channel)

    # ------------------------------------------------------------ from other nodes

    def heard(self, upstream: Upstream, raw: RawFrame) -> None:
        """A frame for the client has come."""
        kind, channel = raw.kind, self._channels.get(raw.channel) if raw.channel else None
        if channel is not None and channel.upstream is not upstream and kind != UNSUBSCRIBED:
            return  # of a subscription that has ended
        if kind == PUBLISHED:
            self._answered(upstream, raw.command().request)
        elif kind == FAILED:
            command = raw.command()
            stream = self._answered(upstream, command.request)
            if channel is not None and not channel.begun and command.request == channel.request:
                del self._channels[raw.channel]
            self._session.pass_back(raw.data)
            if stream is not None and command.code == NoMasterError.code:
                self._refuse_more(stream)
            return
        elif channel is not None and kind == SUBSCRIBED:
            channel.begun = True
        elif channel is not None and kind == UNSUBSCRIBED and channel.upstream is upstream:
            if channel.owed:
                channel.owed -= 1
            if channel.leaving and not channel.owed:
                del self._channels[raw.channel]
        self._session.pass_back(raw.data)

    def _answered(self, upstream: Upstream, request: int) -> str | None:
        stream = upstream.publishes.pop(request, None)
        if stream is not None:
            self.answered(stream)
        return stream

    def room_there(self) -> None:
        """Another node has taken what waited for it."""
        self._session.go_on()

    def room_here(self) -> None:
        """So has the client."""
        for upstream in self._upstreams.values():
            upstream.read()

    def broke(self, upstream: Upstream) -> None:
        """A connection that was open is no more."""
        if not self._over:
            self._session.cut_off()

    # ------------------------------------------------------------ moving, ending

    def moved(self, gone: Callable[[str], bool]) -> bool:
        """Whether something hangs on a master that is none any more, of a stream that `gone` names."""
        used = {(stream, busy.where) for stream, busy in self._busy.items()}
        for channel in self._channels.values():
            if channel.upstream is not None and channel.key[1]:
                used.add((channel.key[0], channel.upstream.node))
        return any(gone(stream) and not self._still(stream, where) for stream, where in used)

    def _still(self, stream: str, where: str) -> bool:
        if where == HERE:
            return False
        place = self._where((stream, True))
        return isinstance(place, There) and place.node == where

    def ended(self) -> None:
        """The client is gone, or is to go."""
        self._over = True
        for task in self._tasks:
            task.cancel()
        for line in self._lines.values():
            line.clear()
        self._lines.clear()
        self._channels.clear()
        for upstream in self._upstreams.values():
            upstream.close()
        self._upstreams.clear()


def _named(place: There) -> tuple[str, str, int]:
    return place.node, place.host, place.port


def _refusal(stream: str, write: bool = True, why: Exception | None = None) -> NoMasterError:
    what = "no master" if write else "no copy that can be reached"
    more = f" ({why})" if why is not None else ""
    return NoMasterError(f"the stream {stream!r} has {what} now{more}; nothing was done: try again")
