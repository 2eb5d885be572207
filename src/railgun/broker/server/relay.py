"""What a client asks for and another node serves: its session gets a session of its own there.

Rules:

1. Whoever serves a stream gets the frames that are about it as they came, and its answers go back as they came: numbers
   and channels are the client's own. Only pings are answered here. A session that was passed on is not passed on again.
2. What cannot be served now, because there is no master or no connection to it yet, waits in a line of its own for each
   stream, with all that follows for it, for `master_wait` seconds. Then the whole line is refused with `NO_MASTER`:
   nothing of it was done. If there is no quorum for longer than that, it is refused at once. What a stream is like
   (`describe`) is told by the copy of this node then, if it has one.
3. Publishes of a stream do not overtake each other. When one was refused, so are those that were on their way: a ping
   goes after the refusal, and until its pong comes all publishes of the stream are refused. So is it between nodes:
   the pong goes back when this node refuses, too.
4. A connection to another node that breaks ends the client's: it begins anew, at any node, and does what it does after
   every lost connection. When a stream has another master than before, members of its groups subscribe again, and
   publishes wait until those before them are answered by the old one; if it does not for `ANSWERS_S`, the client's
   connection ends.
5. What waits is bounded. A client that sends more than is taken is not read, and neither is a node that sends more than
   the client takes. Answers of nodes do not depend on being read, so the two never wait for each other.
6. A reader without a group whose position this node's copy does not have (yet) is handed to the master. One that
   begins at the end begins at the end of the stream: the master is asked where that is, and the copy serves the reader
   if it is as far, or is so within `CATCH_UP_S`; else the master does. Without a quorum nobody can be asked, and the
   reader begins at the end of the copy.
7. A node that is about to end says so (`GoingAway`), and gets no more; what it refuses (`STOPPING`) goes back to the
   client, which sends it again. When its connection ends nothing is in doubt, and the client's stays.
8. When the client goes, its sessions elsewhere go at once, after what it has sent, and that it has gone (`GoingAway`).
   A session that ends without that has ended with this node, or the connection to it: its consumers did nothing wrong.
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
from railgun.broker.server.upstream import ROOM, Upstream, UpstreamError
from railgun.broker.streams import admin
from railgun.broker.streams.persistent import Persistent
from railgun.broker.streams.routing import Here, Nobody, Place, Routing, There
from railgun.errors import RailgunError
from railgun.transport.commands import NUMBERS, RawFrame
from railgun.transport.proto import streams_pb2 as p

if TYPE_CHECKING:
    from railgun.broker.server.session import Session

HERE: Final = ""
"""This node, where others have an id."""
PER_FRAME: Final = 512  # bytes that a frame takes besides its own while it waits
ANSWERS_S: Final = 1.0  # seconds in which a master that is none any more answers what it has got
AGAIN: Final = (0.05, 0.5)  # seconds to the next try to connect: at first, and at most
CATCH_UP_S: Final = 0.5  # seconds that a copy has to get to the end its master has told
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
ON_A_CHANNEL: Final = frozenset(
    NUMBERS[kind] for kind in (p.Ack, p.Nack, p.InProgress, p.Grant, p.Unsubscribe)
)
_LOG: Final = logging.getLogger(__name__)


class _Key(NamedTuple):
    """What waits in one line: all that is about a stream, and for its master or not."""

    stream: str
    write: bool
    at_end: int = 0
    """The channel of a reader that begins at the end, which has a line of its own: others need not wait for where that
    is. 0: it is none."""


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
    end: int | None = None
    """Where the stream ended at the master when this was asked for already; None: not known."""
    caught_up_by: float = 0.0
    """Until when this node's copy has time to get there."""

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
            self._by_stream(raw, command, _Key(command.stream, True))
        elif kind == SUBSCRIBE:
            command = raw.command()
            of_master = bool(command.group) or self._behind(command)
            at_end = raw.channel if command.start == p.END and not of_master else 0
            self._by_stream(raw, command, _Key(command.stream, of_master, at_end))
        elif kind == ADMIN and (named := self._named(command := raw.command())) is not None:
            self._by_stream(raw, command, _Key(named, True))
        elif kind == PONG:
            self._seen(raw.command().number)
        else:
            self._session.take(raw.frame())

    def _behind(self, command: p.Subscribe) -> bool:
        """Return whether this node's copy is not as far as a reader without a group: the master serves that one."""
        here = self._session.node.streams.get(command.stream)
        if not isinstance(here, Persistent) or command.start != p.OFFSET:
            return False
        identity = self._session.node.identity_of(here)
        other = bool(command.identity and identity and command.identity != identity)
        return other or command.offset > here.end

    def _named(self, command: p.Admin) -> str | None:
        """The stream whose master a call is for; None: this node answers, be it that it makes no sense."""
        if command.call not in admin.OF_MASTER:
            return None
        with contextlib.suppress(RailgunError):
            name = admin.arguments_of(command.arguments).get("name")
            return name if isinstance(name, str) else None
        return None

    def _by_stream(self, raw: RawFrame, command: Any, key: _Key) -> None:
        if self._session.going:
            told = "this node is about to end; nothing was done: ask another one"
            self._fail(raw, command, StoppingError(told))
            return
        if raw.kind == PUBLISH and key.stream in self._refusing:
            self._fail(raw, command, _refusal(key.stream))
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
            task = self._loop.create_task(self._wait(key, line))
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
            channel.leaving = channel.leaving or raw.kind == UNSUBSCRIBE
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
            place = self._place(asked)
        except RailgunError as error:
            self._fail(asked.raw, asked.command, error)
            return True
        match place:
            case Here():
                if self._elsewhere(asked, HERE):
                    return False
                self._here(asked)
            case There() if self._session.forwarded:
                self._refuse([asked])
            case There():
                upstream = self._upstreams.get(place.node)
                if upstream is None or not upstream.open or upstream.going:
                    return False
                if self._elsewhere(asked, place.node):
                    return False
                self._there(asked, upstream)
            case Nobody() if place.hopeless:
                self._refuse([asked])
            case Nobody():
                return False
        return True

    def _place(self, asked: _Asked) -> Place:
        """Return who serves what was asked for; raises what `Routing.serves` does."""
        key = asked.key
        place = self._routing.serves(key.stream, key.write)
        here = self._session.node.streams.get(key.stream)
        if not key.at_end or not isinstance(place, Here) or not isinstance(here, Persistent):
            return place
        try:
            of_master = self._routing.serves(key.stream, True)
        except RailgunError:  # this node is the master, and cannot write: nobody is further
            return place
        if isinstance(of_master, Here) or (isinstance(of_master, Nobody) and of_master.hopeless):
            return place
        if asked.end is None:
            return Nobody(NoMasterError("its master has not told where it ends"))
        if here.end >= asked.end:
            return place
        if self._session.forwarded or self._loop.time() < asked.caught_up_by:
            return Nobody(NoMasterError(f"the copy is at {here.end}, and it ends at {asked.end}"))
        return of_master

    def _elsewhere(self, asked: _Asked, where: str) -> bool:
        """Return whether publishes before this one went to another node, and are not answered: it waits for them."""
        busy = self._busy.get(asked.key.stream)
        return asked.raw.kind == PUBLISH and busy is not None and busy.where != where

    def _here(self, asked: _Asked) -> None:
        if asked.raw.kind == SUBSCRIBE:
            self._channels.pop(asked.raw.channel, None)
        self._session.take(asked.raw.frame())

    def _there(self, asked: _Asked, upstream: Upstream) -> None:
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

    async def _wait(self, key: _Key, line: deque[_Asked]) -> None:
        """Let those in a line go as soon as they can, in order; refuse them when it takes too long.

        The line may be refused, and empty, before this begins.
        """
        pause = AGAIN[0]
        while line and not self._over:
            if line[0].deadline <= self._loop.time() or not self._let_go(line):
                left = line[0].deadline - self._loop.time()
                if left <= 0:
                    self._give_up(line)
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        pause = await self._change(line[0], pause)
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

    async def _change(self, asked: _Asked, pause: float) -> float:
        """Until something may be another way; how long to wait when a connection cannot be made."""
        key = asked.key
        place = self._where(asked)
        if key.at_end and isinstance(place, Nobody):
            return await self._find_end(asked, pause)
        key_of_master = (key.stream, key.write or bool(key.at_end))
        busy = self._busy.get(key.stream)
        there = place.node if isinstance(place, There) else HERE
        if busy is not None and busy.where != there and not isinstance(place, Nobody):
            await asyncio.sleep(AGAIN[0])  # until those before are answered
            return AGAIN[0]
        if not isinstance(place, There):
            await self._routing.wait(*key_of_master)
            return AGAIN[0]
        upstream = self._upstreams.get(place.node)
        if upstream is None or upstream.address != (place.host, place.port):
            if upstream is not None:
                upstream.close()
            upstream = self._upstreams[place.node] = Upstream(self, self._session, place)
        if upstream.going:  # another node will be asked, or this one when it is back
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN[0]):
                    await self._routing.wait(*key_of_master)
            return AGAIN[0]
        changed = self._loop.create_task(self._routing.wait(*key_of_master))
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
                await self._routing.wait(*key_of_master)
        return min(2 * pause, AGAIN[1])

    async def _find_end(self, asked: _Asked, pause: float) -> float:
        """Ask the master where the stream ends, or let this node's copy get there; how long to wait the next time."""
        stream = asked.key.stream
        if asked.end is not None:
            await asyncio.sleep(AGAIN[0])
            return AGAIN[0]
        asked.end = await self._routing.end(stream)
        if asked.end is not None:
            asked.caught_up_by = self._loop.time() + CATCH_UP_S
            return AGAIN[0]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._routing.wait(stream, True)
        return min(2 * pause, AGAIN[1])

    def _where(self, asked: _Asked) -> Place:
        try:
            return self._place(asked)
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
            stream, write = asked.key.stream, asked.key.write or bool(asked.key.at_end)
            if self._is_told_here(asked):
                self._session.take(asked.raw.frame())
                continue
            why = _refusal(stream, write)
            with contextlib.suppress(RailgunError):
                place = self._place(asked)
                if isinstance(place, Nobody):
                    why = _refusal(stream, write, place.why, place.hopeless)
            self._fail(asked.raw, asked.command, why)
        for stream in {asked.key.stream for asked in every if asked.raw.kind == PUBLISH}:
            self._refuse_more(stream)

    def _is_told_here(self, asked: _Asked) -> bool:
        """Return whether this node can answer, though it is not the master: by its copy, as it answers readers."""
        if asked.raw.kind != ADMIN or asked.command.call not in admin.OF_COPY:
            return False
        return not self._session.forwarded and asked.key.stream in self._session.node.streams

    def was_refused(self, stream: str) -> None:
        """Let no publish overtake one that had been taken, and was refused: it is sent again."""
        self._refuse_more(stream)
        behind = self._lines.get(_Key(stream, True))
        if behind:  # what waits came after what was refused
            self._give_up(behind)

    def _refuse_more(self, stream: str) -> None:
        """Refuse publishes until the client has seen that one was."""
        self._pings += 1
        self._refusing[stream] = self._pings
        self._session.send(p.Ping(number=self._pings))

    def _seen(self, number: int) -> None:
        self._session.confirmed(number)
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
        if channel is None and kind == DELIVER:
            return  # so is this
        if kind == PUBLISHED:
            self._answered(upstream, raw.command().request)
        elif kind == FAILED:
            command = raw.command()
            stream = self._answered(upstream, command.request)
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
        """A connection that was open is no more; if the other node has ended in order, nothing is in doubt."""
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
        """Whether publishes of the client are not answered, or wait."""
        return bool(self._busy or self._lines)

    @property
    def consumes(self) -> bool:
        """Whether the client is a member of groups at other nodes."""
        return any(one.begun and one.key.write for one in self._channels.values())

    # ------------------------------------------------------------ moving, ending

    def moved(self, gone: Callable[[str], bool]) -> None:
        """Let members of groups subscribe again whose master (of streams that `gone` names) is none any more.

        Publishes that hang on such a master are answered by it, as done or as refused, if it lives. If it is silent
        for `ANSWERS_S` nobody knows what becomes of them, and the client is cut off.
        """
        for number, channel in list(self._channels.items()):
            stream = channel.key.stream
            if channel.upstream is None or not channel.key.write or not gone(stream):
                continue
            if not self._still(stream, channel.upstream.node):
                elsewhere = NoMasterError(f"{stream!r} has another master: subscribe again")
                self._lose(number, channel, elsewhere)
        for stream, busy in self._busy.items():
            if gone(stream) and not self._still(stream, busy.where):
                self._loop.call_later(ANSWERS_S, self._check_answered, stream, busy)

    def _check_answered(self, stream: str, busy: _Busy) -> None:
        """Cut the client off if a master that is none any more has not answered its publishes."""
        hangs = self._busy.get(stream) is busy and not self._still(stream, busy.where)
        if hangs and not self._over:
            self._session.cut_off()

    def _lose(self, number: int, channel: _Channel, error: RailgunError) -> None:
        """A subscription at another node has ended: the client is told, and may make it again."""
        del self._channels[number]
        if not channel.leaving:
            self._session.fail(0 if channel.begun else channel.request, error, number)

    def _still(self, stream: str, where: str) -> bool:
        if where == HERE:
            return False
        with contextlib.suppress(RailgunError):
            place = self._routing.serves(stream, True)
            return isinstance(place, There) and place.node == where
        return False

    def ended(self, gone: bool) -> None:
        """End what it has elsewhere. `gone`: the client has gone, which the other nodes are told; else it is to go."""
        self._over = True
        for task in self._tasks:
            task.cancel()
        for line in self._lines.values():
            line.clear()
        self._lines.clear()
        self._channels.clear()
        for upstream in self._upstreams.values():
            if gone:
                upstream.client_gone()
            upstream.close()
        self._upstreams.clear()


def _named(place: There) -> tuple[str, str, int]:
    return place.node, place.host, place.port


def _refusal(
    stream: str, write: bool = True, why: Exception | None = None, no_quorum: bool = False
) -> NoMasterError:
    what = "no master" if write else "no copy that can be reached"
    more = f" ({why})" if why is not None else ""
    text = f"the stream {stream!r} has {what} now{more}; nothing was stored or changed: try again"
    return NoMasterError(text, no_quorum)
