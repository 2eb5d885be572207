"""Feed the replicas of a stream from its master: new messages from memory, missing messages from the log.

Rules:

1. A replica that is up to date gets what was stored in a turn of the event loop in one frame, from memory. A replica
   that lags gets it from the log, read by another thread piece by piece, until it is up to date.
2. At most `WINDOW_BYTES` are unconfirmed by a replica, and for all streams together what `flight` allows. What does not
   fit waits in the log.
3. The states of groups are sent whole first, then each change (`broker.protocol.replication`).
4. A line to a replica lasts for a session, and ends when the replica reports its state anew. What was being read for an
   ended line is not sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from google.protobuf.message import Message

from railgun.broker.cluster import replica_messages as wire
from railgun.broker.cluster.flight import Flight
from railgun.broker.errors import TrimmedError
from railgun.broker.log.group_log import pack_state
from railgun.broker.protocol.replication.master import Master, Peer, Phase
from railgun.broker.streams.groups import CopyNote, fold
from railgun.broker.streams.persistent import Persistent
from railgun.errors import RailgunError
from railgun.transport.commands import Blob
from railgun.transport.records import Bytes, cut, head

WINDOW_BYTES: Final = 32 << 20  # not confirmed by a replica
PUSH_BYTES: Final = 4 << 20  # of one push
READ_BYTES: Final = 4 << 20  # read at once
# Until replicas are told a new safe offset, if there is nothing else to send.
NEWS_DELAY_S: Final = 0.002
RETRY_S: Final = 0.5


class CopyHost(Protocol):
    """The node as a copy of a stream sees it."""

    me: str

    def send(self, to: str, command: Message, blobs: Sequence[Blob] = ()) -> bool:
        """Send a message on the lane `data`. Return False without a connection."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> object:
        """Run `work` in the background."""

    def may_act(self) -> bool:
        """Return whether this node has a lease for the region."""

    def changed(self) -> None:
        """Report that a stream is served or not served any more, or that its epoch is active."""

    def flight(self, node: str) -> Flight:
        """Return the bytes on their way to a node, of all streams."""

    def name_of(self, node: str) -> str:
        """Return the name of a node, for people."""

    def give_way(self) -> bool:
        """Start handing the region over to another node, because this node cannot write. Return False if no node can
        take it.

        If it returns True, every copy of the region later gets the outcome: `step_down`, or `stay`.
        """


class StoredBatches(NamedTuple):
    """Batches that were just stored and are still in memory."""

    base: int
    end: int
    epoch: int
    batches: Sequence[Bytes]
    is_unit: bool = False
    """Whether the batches are one unit, made of several batches."""


@dataclass(slots=True)
class _Line:
    """The connection to a replica for one session, with the bytes that are on their way to it."""

    node_flight: Flight
    flight: deque[tuple[int, int]] = field(default_factory=deque)  # end, bytes
    size: int = 0
    reading: bool = False
    loading: bool = False  # whether the states of groups are being read for it
    room: asyncio.Event = field(default_factory=asyncio.Event)
    # The safe offset and the first offset, as the replica knows them.
    reported: tuple[int, int] | None = None

    def sent(self, end: int, size: int) -> None:
        """Count a push of `size` bytes, which ends at offset `end`, as on its way."""
        self.flight.append((end, size))
        self.size += size
        self.node_flight.add(size)

    def confirmed(self, end: int) -> None:
        """Count everything before `end` as confirmed."""
        before = self.size
        while self.flight and self.flight[0][0] <= end:
            self.size -= self.flight.popleft()[1]
        self.node_flight.give(before - self.size)
        self.room.set()

    def over(self) -> None:
        """Count nothing as on its way any more."""
        self.node_flight.give(self.size)
        self.flight.clear()
        self.size = 0
        self.room.set()


class Feeder:
    """Feeds the replicas of one stream for one epoch; `trouble` is called with errors of the disk."""

    def __init__(
        self,
        master: Master,
        stream: Persistent,
        host: CopyHost,
        trouble: Callable[[RailgunError], None],
    ) -> None:
        self._master, self._stream, self._host, self._trouble = master, stream, host, trouble
        self._loop = stream.loop
        self._lines: dict[str, _Line] = {}
        self._news_timer: asyncio.TimerHandle | None = None
        self._number = 0  # of the last change of groups

    def close(self) -> None:
        """End the sessions with all replicas."""
        if self._news_timer is not None:
            self._news_timer.cancel()
        for node in list(self._lines):
            self.end(node)

    # ------------------------------------------------------------ sessions

    def begin(self, node: str) -> None:
        """Begin a session with a replica, or begin it again because the replica has reported its state anew."""
        self.end(node)
        self._lines[node] = _Line(self._host.flight(node))
        self.serve(node)

    def end(self, node: str) -> None:
        """End the session with a replica."""
        line = self._lines.pop(node, None)
        if line is not None:
            line.over()

    def serve(self, node: str) -> None:
        """Send a replica everything it needs. A replica that lacks nothing still has to learn where the epoch began."""
        self.feed(node)
        self.feed_groups(node)
        reached = self._line(node)
        if reached is not None and not reached[0].reading and reached[0].reported is None:
            self._push(node, reached[0], reached[1].next)

    def _line(self, node: str) -> tuple[_Line, Peer] | None:
        """Return the line and the peer of a replica, or None if it has no session or may not be fed."""
        line, peer = self._lines.get(node), self._master.peers.get(node)
        if line is None or peer is None or peer.session is None:
            return None
        return (line, peer) if self._master.phase is Phase.LEAD else None

    # ------------------------------------------------------------ messages

    def feed_all(self, fresh: Sequence[StoredBatches]) -> None:
        """Send new messages to all replicas."""
        for node in list(self._lines):
            self.feed(node, fresh)

    def feed(self, node: str, fresh: Sequence[StoredBatches] = ()) -> None:
        """Send a replica the messages it lacks, as far as there is room."""
        reached = self._line(node)
        if reached is None or reached[0].reading:
            return
        line, peer = reached
        batches: list[Bytes] = []
        size = last = 0
        for stored in fresh:
            if line.size >= WINDOW_BYTES or stored.base != (last if batches else peer.next):
                continue
            batches += stored.batches
            size, last = size + sum(map(len, stored.batches)), stored.end
            if size >= PUSH_BYTES:
                self._push(node, line, last, batches, size)
                batches, size = [], 0
        if batches:
            self._push(node, line, last, batches, size)
        if peer.next < self._master.copy.durable:
            line.reading = True
            self._host.spawn(self._catch_up(node, line, peer))

    def _push(
        self, node: str, line: _Line, end: int, batches: Sequence[Bytes] = (), size: int = 0
    ) -> None:
        push = self._master.push(node, end)
        if push is None:
            return
        line.reported = (push.safe, push.first)
        if size:
            line.sent(push.end, size)
        self._host.send(node, wire.encode_push(self._stream.id, push), batches)

    async def _catch_up(self, node: str, line: _Line, peer: Peer) -> None:
        """Read the messages that a replica lacks from the log, and send them piece by piece."""
        copy = self._master.copy
        try:
            while self._lines.get(node) is line and peer.next < copy.durable:
                if line.size >= WINDOW_BYTES:
                    line.room.clear()
                    await line.room.wait()
                    continue
                await line.node_flight.take(READ_BYTES)
                try:
                    if not await self._send_next(node, line, peer):
                        break
                finally:
                    line.node_flight.give(READ_BYTES)
        except RailgunError as error:
            self._trouble(error)
            self._loop.call_later(RETRY_S, self.feed, node)
            return
        finally:
            line.reading = False
        if self._lines.get(node) is line:
            self.feed(node)

    async def _send_next(self, node: str, line: _Line, peer: Peer) -> bool:
        """Send a replica the next piece from the log. Return whether there may be more."""
        copy, log = self._master.copy, self._stream.log
        begin, end = max(peer.next, copy.first), copy.durable
        batches: Sequence[Bytes]
        try:  # the log may already hold more than this copy counts as durable: that comes later
            batches = await self._loop.run_in_executor(None, log.read, begin, READ_BYTES, end)
        except TrimmedError as error:  # trimmed meanwhile
            self._master.trimmed(error.first)
            return True
        if self._lines.get(node) is not line or not batches:
            return False
        batches = batches_from(begin, batches)
        self._push(node, line, head(batches[-1]).end, batches, sum(map(len, batches)))
        return True

    def confirmed(self, node: str, end: int) -> None:
        """Note that a replica has everything before `end` on its disk, and send it more."""
        if node in self._lines:
            self._lines[node].confirmed(end)
            self.feed(node)

    def report_soon(self) -> None:
        """Tell replicas soon which messages are safe, and which are no longer kept."""
        if self._news_timer is None:
            self._news_timer = self._loop.call_later(NEWS_DELAY_S, self._report)

    def _report(self) -> None:
        self._news_timer = None
        news = (self._master.copy.safe, self._master.copy.first)
        for node in list(self._lines):
            reached = self._line(node)
            if reached is not None and reached[0].reported != news and not reached[0].reading:
                self._push(node, reached[0], reached[1].next)

    # ------------------------------------------------------------ groups

    def change_groups(self, number: int, blob: bytes) -> None:
        """Send a change of groups to all replicas."""
        self._number = number
        for node in list(self._lines):
            push = self._master.push_groups(node, whole=False, number=number)
            if push is not None:
                self._host.send(node, wire.encode_push_groups(self._stream.id, push), [blob])
                continue
            peer = self._master.peers.get(node)
            if peer is not None and peer.sent is not None and peer.sent < number:
                peer.sent = None  # changes are missing before this one
            self.feed_groups(node)

    def feed_groups(self, node: str) -> None:
        """Send a replica the states of all groups, unless it has them."""
        reached = self._line(node)
        if reached is not None and reached[1].sent is None and not reached[0].loading:
            reached[0].loading = True
            self._host.spawn(self._send_groups(node, reached[0]))

    async def _send_groups(self, node: str, line: _Line) -> None:
        try:
            states = await self._stream.perform(self._stream.group_log, self._stream.group_log.load)
        except RailgunError as error:
            self._trouble(error)
            self._loop.call_later(RETRY_S, self.feed_groups, node)
            return
        finally:
            line.loading = False
        note = states.pop("", None)
        if self._lines.get(node) is not line or not isinstance(note, CopyNote):
            return
        if note.groups[1] < self._number:  # this line did not get a later change
            self.feed_groups(node)
            return
        push = self._master.push_groups(node, whole=True, number=note.groups[1])
        if push is not None:
            self._host.send(
                node, wire.encode_push_groups(self._stream.id, push), [pack_states(states)]
            )


def batches_from(begin: int, batches: Sequence[Bytes]) -> Sequence[Bytes]:
    """Return the batches without messages before offset `begin`: a log may return a batch that begins earlier.

    >>> batches_from(1, [])
    []
    """
    if not batches or head(batches[0]).base >= begin:
        return batches
    return [cut(batches[0], begin, head(batches[0]).end), *batches[1:]]


def pack_states(states: dict[str, Any]) -> bytes:
    """Encode the states of groups for the wire."""
    return b"".join(pack_state(name, fold.dump(state)) for name, state in states.items())
