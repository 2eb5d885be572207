"""How the master of a stream feeds its replicas: what is new from memory, what they lack from the log.

Rules:

1. A replica that is up with the master gets what was stored in a turn of the event loop in one frame, from memory. One
   that lags behind gets it from the log, read by another thread in pieces, until it is up with it.
2. At most `WINDOW` bytes are ahead of what a replica has confirmed, and of all streams together what `flight` lets
   through. What does not fit waits in the log.
3. States of groups go whole first, then each change (`broker.protocol.replication`).
4. A line to a replica lasts for a session, and ends when the replica tells anew how it stands. What was being read for
   a line that is over is not sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from google.protobuf.message import Message

from railgun.broker.cluster import replica_messages as words
from railgun.broker.cluster.flight import Flight
from railgun.broker.errors import TrimmedError
from railgun.broker.log.group_log import pack_state
from railgun.broker.protocol.replication.master import Master, Peer, Phase
from railgun.broker.streams.groups import CopyNote, fold
from railgun.broker.streams.persistent import Persistent
from railgun.errors import RailgunError
from railgun.transport.commands import Blob
from railgun.transport.records import Bytes, cut, head

WINDOW: Final = 32 << 20  # bytes that a replica has not confirmed
FRAME: Final = 4 << 20  # bytes of one push
PIECE: Final = 4 << 20  # bytes read at once
NEWS: Final = 0.002  # seconds until replicas hear what is safe, if there is nothing else to tell
RETRY: Final = 0.5


class Around(Protocol):
    """What a copy asks of its node."""

    me: str

    def send(self, to: str, command: Message, blobs: Sequence[Blob] = ()) -> bool:
        """Send a message on the lane `data`."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> object:
        """Do this beside all else."""

    def may_act(self) -> bool:
        """Whether this node has a lease for the region."""

    def changed(self) -> None:
        """A stream has begun or ceased to be served, or its epoch is active."""

    def flight(self, node: str) -> Flight:
        """What is on its way to a node, of all streams."""

    def called(self, node: str) -> str:
        """Return the name of a node, for people."""

    def give_way(self) -> bool:
        """Let another node be master, for this one cannot write; False: there is none that could.

        If it is True, every copy of the region hears what came of it: `step_down`, or `stay`.
        """


class Fresh(NamedTuple):
    """What was stored, and is still in memory."""

    base: int
    end: int
    epoch: int
    batches: Sequence[Bytes]
    is_unit: bool = False
    """Whether the batches are one unit, of several."""


@dataclass(slots=True)
class _Line:
    """What is on its way to a replica."""

    to: Flight
    flight: deque[tuple[int, int]] = field(default_factory=deque)  # end, bytes
    size: int = 0
    reading: bool = False
    loading: bool = False  # whether the states of groups are being read for it
    room: asyncio.Event = field(default_factory=asyncio.Event)
    told: tuple[int, int] | None = None  # what is safe, and the first offset, as it has heard

    def sent(self, end: int, size: int) -> None:
        """More is on its way."""
        self.flight.append((end, size))
        self.size += size
        self.to.add(size)

    def confirmed(self, end: int) -> None:
        """It has all up to there."""
        before = self.size
        while self.flight and self.flight[0][0] <= end:
            self.size -= self.flight.popleft()[1]
        self.to.give(before - self.size)
        self.room.set()

    def over(self) -> None:
        """Nothing of it is on its way any more."""
        self.to.give(self.size)
        self.flight.clear()
        self.size = 0
        self.room.set()


class Feeder:
    """Feeds the replicas of one stream, for one epoch; `trouble` is called with what the disk says."""

    def __init__(
        self,
        master: Master,
        stream: Persistent,
        around: Around,
        trouble: Callable[[RailgunError], None],
    ) -> None:
        self._master, self._stream, self._around, self._trouble = master, stream, around, trouble
        self._loop = stream.loop
        self._lines: dict[str, _Line] = {}
        self._news: asyncio.TimerHandle | None = None
        self._number = 0  # of the last change of groups

    def close(self) -> None:
        """Feed nobody any more."""
        if self._news is not None:
            self._news.cancel()
        for node in list(self._lines):
            self.end(node)

    # ------------------------------------------------------------ sessions

    def begin(self, node: str) -> None:
        """A session begins, or a replica has told anew how it stands."""
        self.end(node)
        self._lines[node] = _Line(self._around.flight(node))
        self.serve(node)

    def end(self, node: str) -> None:
        """The session with a replica is over."""
        line = self._lines.pop(node, None)
        if line is not None:
            line.over()

    def serve(self, node: str) -> None:
        """Send all that a replica has to get: also one that lacks nothing has to hear where the epoch began."""
        self.feed(node)
        self.feed_groups(node)
        found = self._line(node)
        if found is not None and not found[0].reading and found[0].told is None:
            self._push(node, found[0], found[1].next)

    def _line(self, node: str) -> tuple[_Line, Peer] | None:
        """How a replica is reached, if it is, and may be fed."""
        line, peer = self._lines.get(node), self._master.peers.get(node)
        if line is None or peer is None or peer.session is None:
            return None
        return (line, peer) if self._master.phase is Phase.LEAD else None

    # ------------------------------------------------------------ messages

    def feed_all(self, fresh: Sequence[Fresh]) -> None:
        """More is stored: to all replicas."""
        for node in list(self._lines):
            self.feed(node, fresh)

    def feed(self, node: str, fresh: Sequence[Fresh] = ()) -> None:
        """Send a replica what it lacks, as far as there is room."""
        found = self._line(node)
        if found is None or found[0].reading:
            return
        line, peer = found
        batches: list[Bytes] = []
        size = last = 0
        for one in fresh:
            if line.size >= WINDOW or one.base != (last if batches else peer.next):
                continue
            batches += one.batches
            size, last = size + sum(map(len, one.batches)), one.end
            if size >= FRAME:
                self._push(node, line, last, batches, size)
                batches, size = [], 0
        if batches:
            self._push(node, line, last, batches, size)
        if peer.next < self._master.copy.durable:
            line.reading = True
            self._around.spawn(self._catch_up(node, line, peer))

    def _push(
        self, node: str, line: _Line, end: int, batches: Sequence[Bytes] = (), size: int = 0
    ) -> None:
        push = self._master.push(node, end)
        if push is None:
            return
        line.told = (push.safe, push.first)
        if size:
            line.sent(push.end, size)
        self._around.send(node, words.push(self._stream.id, push), batches)

    async def _catch_up(self, node: str, line: _Line, peer: Peer) -> None:
        """Read what a replica lacks from the log, piece by piece."""
        copy = self._master.copy
        try:
            while self._lines.get(node) is line and peer.next < copy.durable:
                if line.size >= WINDOW:
                    line.room.clear()
                    await line.room.wait()
                    continue
                await line.to.take(PIECE)
                try:
                    if not await self._send_piece(node, line, peer):
                        break
                finally:
                    line.to.give(PIECE)
        except RailgunError as error:
            self._trouble(error)
            self._loop.call_later(RETRY, self.feed, node)
            return
        finally:
            line.reading = False
        if self._lines.get(node) is line:
            self.feed(node)

    async def _send_piece(self, node: str, line: _Line, peer: Peer) -> bool:
        """The next piece that a replica lacks, from the log; whether there may be more."""
        copy, log = self._master.copy, self._stream.log
        begin, end = max(peer.next, copy.first), copy.durable
        batches: Sequence[Bytes]
        try:  # the log may have more already, of which nobody knows here: that comes later
            batches = await self._loop.run_in_executor(None, log.read, begin, PIECE, end)
        except TrimmedError as error:  # meanwhile
            self._master.trimmed(error.first)
            return True
        if self._lines.get(node) is not line or not batches:
            return False
        batches = begun_at(begin, batches)
        self._push(node, line, head(batches[-1]).end, batches, sum(map(len, batches)))
        return True

    def confirmed(self, node: str, end: int) -> None:
        """A replica has all up to there on its disk: there may be room for more."""
        if node in self._lines:
            self._lines[node].confirmed(end)
            self.feed(node)

    def tell_soon(self) -> None:
        """Let replicas hear what is safe, and what is not kept any more."""
        if self._news is None:
            self._news = self._loop.call_later(NEWS, self._tell)

    def _tell(self) -> None:
        self._news = None
        news = (self._master.copy.safe, self._master.copy.first)
        for node in list(self._lines):
            found = self._line(node)
            if found is not None and found[0].told != news and not found[0].reading:
                self._push(node, found[0], found[1].next)

    # ------------------------------------------------------------ groups

    def change_groups(self, number: int, blob: bytes) -> None:
        """The states of groups have changed: to all replicas."""
        self._number = number
        for node in list(self._lines):
            push = self._master.push_groups(node, whole=False, number=number)
            if push is not None:
                self._around.send(node, words.push_groups(self._stream.id, push), [blob])
                continue
            peer = self._master.peers.get(node)
            if peer is not None and peer.sent is not None and peer.sent < number:
                peer.sent = None  # there is a gap before it
            self.feed_groups(node)

    def feed_groups(self, node: str) -> None:
        """Send a replica the states of all groups, if it has not got them."""
        found = self._line(node)
        if found is not None and found[1].sent is None and not found[0].loading:
            found[0].loading = True
            self._around.spawn(self._send_groups(node, found[0]))

    async def _send_groups(self, node: str, line: _Line) -> None:
        try:
            states = await self._stream.perform(self._stream.group_log, self._stream.group_log.load)
        except RailgunError as error:
            self._trouble(error)
            self._loop.call_later(RETRY, self.feed_groups, node)
            return
        finally:
            line.loading = False
        note = states.pop("", None)
        if self._lines.get(node) is not line or not isinstance(note, CopyNote):
            return
        if note.groups[1] < self._number:  # there was a change since, which this line did not get
            self.feed_groups(node)
            return
        push = self._master.push_groups(node, whole=True, number=note.groups[1])
        if push is not None:
            self._around.send(node, words.push_groups(self._stream.id, push), [packed(states)])


def begun_at(begin: int, batches: Sequence[Bytes]) -> Sequence[Bytes]:
    """Batches from that offset on: what a log keeps may begin within one.

    >>> begun_at(1, [])
    []
    """
    if not batches or head(batches[0]).base >= begin:
        return batches
    return [cut(batches[0], begin, head(batches[0]).end), *batches[1:]]


def packed(states: dict[str, Any]) -> bytes:
    """The states of groups, as they travel."""
    return b"".join(pack_state(name, fold.dump(state)) for name, state in states.items())
