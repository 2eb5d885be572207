"""Ephemeral streams across the nodes of a cluster: who listens where, and messages on their way to them.

Rules:

1. Every node knows the listeners of the others (`broker.protocol.interest`) and has them as members of its own
   exchanges. The node of a publisher decides for all; a message crosses a link at most once, however many get it there,
   and is never passed on from there.
2. The node of a listener is the judge: who has left gets nothing, and who has no credit loses, is told, and counts.
3. What is told of listeners in a turn of the event loop goes in one frame to each node; so do losses.
4. A publisher is never held up. When too much waits on the way to a node, its listeners have no credit until there
   is room.
5. A lost connection takes all listeners behind it away at once, and a new one brings them back.
6. Messages of a publisher without a response reach each listener in order: they are shared out where they come in,
   and a link keeps the order. What was sent on a connection that has been replaced is not taken any more.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from railgun.broker.cluster.links import Links
from railgun.broker.cluster.responding import Done, Responding
from railgun.broker.protocol.exchange import Loss, Routing, Send
from railgun.broker.protocol.interest import Listening, Neighbour, News, Remote
from railgun.broker.streams.listener import (
    MAX_UNSENT_BYTES,
    SOFT_UNSENT_BYTES,
    Listener,
    slice_batches,
)
from railgun.broker.streams.node import Ephemeral, Node
from railgun.transport.commands import Blob, FrameError
from railgun.transport.proto import cluster_pb2 as n
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import head, split

MOST_TOLD: Final = 10_000  # listeners in one frame
MOST_PARTS: Final = 200_000  # of one frame
LOOK: Final = 0.02  # seconds between two looks whether there is room


class Events:
    """The part of a node in the ephemeral streams of a cluster. Made within an event loop; the node has it then."""

    def __init__(self, node: Node, links: Links, me: str) -> None:
        self.responding = Responding(node, links, me, self._up)
        self._node, self._links = node, links
        self._neighbours: dict[str, Neighbour] = {}
        self._mine: dict[int, Listener] = {}
        self._numbers = itertools.count(1)
        self._lines = itertools.count(time.time_ns())  # not those of an earlier process
        self._changed: dict[Listener, None] = {}
        self._gone: list[int] = []
        self._lost: dict[str, dict[int, int]] = {}  # by node and listener
        self._turn = False  # whether there will be a flush
        self._looking: dict[str, asyncio.TimerHandle] = {}
        self._closed = False
        node.events = self
        for stream in node.streams.values():
            if isinstance(stream, Ephemeral):
                for listener in stream.exchange.members():
                    self.joined(listener)

    def close(self) -> None:
        """Say nothing more."""
        self._closed = True
        self.responding.close()
        for timer in self._looking.values():
            timer.cancel()

    def _up(self) -> Iterator[str]:
        """The other nodes that can be reached."""
        return (one.node for one in self._neighbours.values() if one.line)

    def _neighbour(self, node: str) -> Neighbour:
        found = self._neighbours.get(node)
        if found is None:
            found = self._neighbours[node] = Neighbour(node, self._exchange)
        return found

    def _exchange(self, stream: str) -> Listening | None:
        found = self._node.streams.get(stream)
        return found.exchange if isinstance(found, Ephemeral) else None

    # ------------------------------------------------------------ what happens on this node

    def joined(self, listener: Listener) -> None:
        """Somebody listens here."""
        listener.number = next(self._numbers)
        self._mine[listener.number] = listener
        self.changed(listener)

    def changed(self, listener: Listener) -> None:
        """Its credit has."""
        if listener.number in self._mine:
            self._changed[listener] = None
            self._soon()

    def left(self, listener: Listener) -> None:
        """It listens no longer."""
        if self._mine.pop(listener.number, None) is not None:
            self._changed.pop(listener, None)
            self._gone.append(listener.number)
            self._soon()

    def stream_made(self, stream: Ephemeral) -> None:
        """There is such a stream now: those who listen to it elsewhere take their places."""
        for neighbour in self._neighbours.values():
            neighbour.known.appeared(stream.name, stream.exchange)

    def stream_gone(self, name: str) -> None:
        """There is no such stream any more."""
        for neighbour in self._neighbours.values():
            neighbour.known.vanished(name)

    def scatter(
        self, command: p.Publish, batches: Sequence[Blob], routing: Routing[Any, Any]
    ) -> Routing[Any, Any]:
        """Send the other nodes what goes there; what is left are those who listen here."""
        here: list[Send[Any]] = []
        there: dict[str, list[Send[Remote]]] = {}
        for send in routing.sends:
            if isinstance(send.member, Remote):
                send.member.sent += send.end - send.first
                there.setdefault(send.member.node, []).append(send)
            else:
                here.append(send)
        for node, sends in there.items():
            self._scatter(node, sends, command, batches, routing.count)
        losses = [self._losers_here(loss) for loss in routing.losses]
        return replace(routing, sends=tuple(here), losses=tuple(losses))

    def _scatter(
        self,
        node: str,
        sends: list[Send[Remote]],
        command: p.Publish,
        batches: Sequence[Blob],
        count: int,
    ) -> None:
        first = min(send.first for send in sends)
        blob = slice_batches(batches, first, max(send.end for send in sends), count)
        neighbour = self._neighbours[node]
        for at in range(0, len(sends), MOST_PARTS):
            parts = [
                n.Part(listener=s.member.number, first=s.first - first, end=s.end - first)
                for s in sends[at : at + MOST_PARTS]
            ]
            told = n.Scatter(
                stream=command.stream,
                topic=command.topic,
                response=command.response,
                parts=parts,
                line=neighbour.line,
            )
            self._links.send(node, "events", told, blob)
        if self._links.unsent(node, "events") >= MAX_UNSENT_BYTES and not neighbour.known.held:
            neighbour.known.hold()
            self._look_for_room(node)

    def _look_for_room(self, node: str) -> None:
        """Its listeners get messages again when what waits has gone."""
        self._looking.pop(node, None)
        known = self._neighbours[node].known
        if not known.held:  # the connection was lost
            return
        if self._links.unsent(node, "events") < SOFT_UNSENT_BYTES:
            known.free()
            if self._lost:
                self._soon()
        else:
            later = self._node.loop.call_later(LOOK, self._look_for_room, node)
            self._looking[node] = later

    def _losers_here(self, loss: Loss[Any]) -> Loss[Any]:
        here = []
        for member in loss.members:
            if isinstance(member, Remote):
                lost = self._lost.setdefault(member.node, {})
                lost[member.number] = lost.get(member.number, 0) + loss.count
                self._soon()
            else:
                here.append(member)
        return replace(loss, members=tuple(here))

    # ------------------------------------------------------------ responses

    def reserve(self, name: str, timeout: int, done: Done) -> None:
        """A response is awaited here under this name (µs): `done` hears whether it may be."""
        self.responding.reserve(name, timeout, done)

    def released(self, name: str) -> None:
        """It is not awaited here any more."""
        self.responding.released(name)

    def reply(self, name: str, blob: Blob, done: Done | None) -> None:
        """Answer a response that is not awaited here."""
        self.responding.reply(name, blob, done)

    # ------------------------------------------------------------ what others are told

    def _soon(self) -> None:
        if not self._turn and not self._closed:
            self._turn = True
            self._node.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Tell the other nodes what is new."""
        self._turn = False
        if self._closed:
            return
        changed, self._changed = self._changed, {}
        gone, self._gone = self._gone, []
        credits = [(one, one.stream.exchange.credit(one)) for one in changed]
        for neighbour in self._neighbours.values():
            told = neighbour.told
            left = [number for number in gone if told.forget(number)]
            if not neighbour.line:
                continue
            news = [
                _listener(one, limit)
                for one, credit in credits
                if (limit := told.news(one.number, credit)) is not None
            ]
            if news or left:
                self._tell(neighbour, news, left)
        for node in [node for node in self._lost if not self._neighbour(node).known.held]:
            self._tell_losses(self._neighbour(node), self._lost.pop(node))

    def _tell_all(self, neighbour: Neighbour) -> None:
        """Tell a node of all listeners."""
        news = []
        for number, listener in self._mine.items():
            credit = listener.stream.exchange.credit(listener)
            limit = neighbour.told.news(number, credit, always=True)
            assert limit is not None
            news.append(_listener(listener, limit))
        self._tell(neighbour, news, [], whole=True)

    def _tell(
        self, neighbour: Neighbour, news: list[n.Listener], gone: list[int], whole: bool = False
    ) -> None:
        for at in range(0, max(1, len(news)), MOST_TOLD):
            told = n.Interest(
                whole=whole and not at,
                listeners=news[at : at + MOST_TOLD],
                gone=[] if at else gone,
                line=neighbour.line,
                seen=neighbour.heard,
                more=at + MOST_TOLD < len(news),
            )
            self._links.send(neighbour.node, "events", told)

    def _tell_losses(self, neighbour: Neighbour, lost: dict[int, int]) -> None:
        parts = [n.Part(listener=number, lost=count) for number, count in lost.items()]
        for at in range(0, len(parts), MOST_PARTS):
            told = n.Scatter(parts=parts[at : at + MOST_PARTS], line=neighbour.line)
            self._links.send(neighbour.node, "events", told)

    # ------------------------------------------------------------ what others tell

    def up(self, peer: str) -> None:
        """There is a connection to that node: tell it who listens."""
        neighbour = self._neighbour(peer)
        neighbour.up(next(self._lines))
        self._tell_all(neighbour)
        self.responding.remind(peer)

    def down(self, peer: str) -> None:
        """The connection is lost: so are the listeners behind it, for now."""
        self._neighbour(peer).down()
        self._lost.pop(peer, None)
        self.responding.down(peer)

    def received(self, sender: str, command: Any, blob: Blob) -> None:
        """Another node has said something."""
        match command:
            case n.Scatter():
                self._scattered(self._neighbour(sender), command, blob)
            case n.Interest():
                self._heard(self._neighbour(sender), command)
            case n.Reserve() | n.Reserved() | n.Release() | n.Reply() | n.Reached():
                self.responding.received(sender, command, blob)
            case p.Pong():
                pass
            case _:
                raise FrameError(f"{type(command).__name__} is not about events")

    def _heard(self, neighbour: Neighbour, told: n.Interest) -> None:
        news = [
            News(one.number, one.stream, one.matcher, one.group or None, one.limit)
            for one in told.listeners
        ]
        new = neighbour.hear(told.line, told.seen, news, told.gone, told.whole, told.more)
        if new:
            self.responding.anew(neighbour.node)
            if neighbour.line:
                self._tell_all(neighbour)
                self.responding.remind(neighbour.node)

    def _scattered(self, neighbour: Neighbour, told: n.Scatter, blob: Blob) -> None:
        if told.line != neighbour.heard:
            return
        batches = split(blob)
        count = sum(head(batch).count for batch in batches)
        deliver = p.Deliver(topic=told.topic, response=told.response)
        if told.response:
            self.responding.remember(told.response, neighbour.node)
        for part in told.parts:
            if not part.first <= part.end <= count:
                raise FrameError(f"messages {part.first} to {part.end} of {count}")
            listener = self._mine.get(part.listener)
            if listener is None:  # it has left
                continue
            lost, asked = part.lost, part.end - part.first
            if asked:
                neighbour.told.took(part.listener, asked)
                taken = listener.stream.exchange.take(listener, asked)
                lost += asked - taken
                if taken:
                    chosen = slice_batches(batches, part.first, part.first + taken, count)
                    listener.deliver(deliver, chosen, taken)
                self.changed(listener)
            if lost:
                listener.missed(lost)


def _listener(listener: Listener, limit: int) -> n.Listener:
    matcher, group = listener.asked
    return n.Listener(
        number=listener.number,
        stream=listener.stream.name,
        matcher=matcher,
        group=group or "",
        limit=limit,
    )
