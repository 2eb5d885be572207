"""Serve ephemeral streams across the nodes of a cluster: listeners of all nodes, and messages on their way to them.

Rules:

1. Every node knows the listeners of the others (`broker.protocol.interest`) and has them as members of its own
   exchanges. The publisher's node decides for all; a message crosses a link at most once, however many listeners get it
   there, and is never passed on from there.
2. The listener's node has the last word: a listener that has left gets nothing; a listener without credit loses the
   message, and the loss is counted and reported to it.
3. Changes of listeners within one turn of the event loop go in one frame to each node; so do losses.
4. A publisher is never held up. When too much waits on the way to a node, its listeners have no credit until there is
   room.
5. A lost connection removes all listeners behind it at once, and a new connection brings them back.
6. Messages of a publisher without a response reach each listener in order: they are distributed where they arrive, and
   a link keeps the order. Messages from a connection that has been replaced are ignored.
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

MAX_FRAME_LISTENERS: Final = 10_000  # in one frame
MAX_FRAME_PARTS: Final = 200_000  # in one frame
ROOM_CHECK_S: Final = 0.02  # between two checks whether there is room


class Events:
    """The part of a node in the ephemeral streams of a cluster. Create it within an event loop; it registers itself
    at the node."""

    def __init__(self, node: Node, links: Links, me: str) -> None:
        self.responding = Responding(node, links, me, self._reachable)
        self._node, self._links = node, links
        self._neighbours: dict[str, Neighbour] = {}
        self._local: dict[int, Listener] = {}
        self._numbers = itertools.count(1)
        self._lines = itertools.count(time.time_ns())  # higher than those of an earlier process
        self._changed: dict[Listener, None] = {}
        self._left: list[int] = []
        self._losses: dict[str, dict[int, int]] = {}  # messages, by node and listener
        self._flush_scheduled = False
        self._room_timers: dict[str, asyncio.TimerHandle] = {}
        self._closed = False
        node.events = self
        for stream in node.streams.values():
            if isinstance(stream, Ephemeral):
                for listener in stream.exchange.members():
                    self.joined(listener)

    def close(self) -> None:
        """Send nothing more, and stop all timers."""
        self._closed = True
        self.responding.close()
        for timer in self._room_timers.values():
            timer.cancel()

    def _reachable(self) -> Iterator[str]:
        """The IDs of other nodes that can be reached."""
        return (neighbour.node for neighbour in self._neighbours.values() if neighbour.line)

    def _neighbour(self, node: str) -> Neighbour:
        neighbour = self._neighbours.get(node)
        if neighbour is None:
            neighbour = self._neighbours[node] = Neighbour(node, self._exchange)
        return neighbour

    def _exchange(self, stream: str) -> Listening | None:
        local_stream = self._node.streams.get(stream)
        return local_stream.exchange if isinstance(local_stream, Ephemeral) else None

    # ------------------------------------------------------------ events on this node

    def joined(self, listener: Listener) -> None:
        """Announce a new listener of this node to the others."""
        listener.number = next(self._numbers)
        self._local[listener.number] = listener
        self.changed(listener)

    def changed(self, listener: Listener) -> None:
        """Announce a changed credit of a listener to the others."""
        if listener.number in self._local:
            self._changed[listener] = None
            self._flush_soon()

    def left(self, listener: Listener) -> None:
        """Announce to the others that a listener has left."""
        if self._local.pop(listener.number, None) is not None:
            self._changed.pop(listener, None)
            self._left.append(listener.number)
            self._flush_soon()

    def stream_made(self, stream: Ephemeral) -> None:
        """Add the listeners of other nodes to an ephemeral stream that was created here."""
        for neighbour in self._neighbours.values():
            neighbour.known.appeared(stream.name, stream.exchange)

    def stream_gone(self, name: str) -> None:
        """Remove the listeners of other nodes from a deleted stream."""
        for neighbour in self._neighbours.values():
            neighbour.known.vanished(name)

    def scatter(
        self, command: p.Publish, batches: Sequence[Blob], routing: Routing[Any, Any]
    ) -> Routing[Any, Any]:
        """Send messages to listeners of other nodes. Return the part of `routing` that concerns local listeners."""
        local: list[Send[Any]] = []
        remote: dict[str, list[Send[Remote]]] = {}
        for send in routing.sends:
            if isinstance(send.member, Remote):
                send.member.sent += send.end - send.first
                remote.setdefault(send.member.node, []).append(send)
            else:
                local.append(send)
        for node, sends in remote.items():
            self._scatter(node, sends, command, batches, routing.count)
        losses = [self._local_losses(loss) for loss in routing.losses]
        return replace(routing, sends=tuple(local), losses=tuple(losses))

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
        for begin in range(0, len(sends), MAX_FRAME_PARTS):
            parts = [
                n.Part(listener=s.member.number, first=s.first - first, end=s.end - first)
                for s in sends[begin : begin + MAX_FRAME_PARTS]
            ]
            scatter = n.Scatter(
                stream=command.stream,
                topic=command.topic,
                response=command.response,
                parts=parts,
                line=neighbour.line,
            )
            self._links.send(node, "events", scatter, blob)
        if self._links.unsent(node, "events") >= MAX_UNSENT_BYTES and not neighbour.known.held:
            neighbour.known.hold()
            self._look_for_room(node)

    def _look_for_room(self, node: str) -> None:
        """Give the listeners of a node credit again once there is room on the way to it; otherwise check again
        later."""
        self._room_timers.pop(node, None)
        remote_listeners = self._neighbours[node].known
        if not remote_listeners.held:  # the connection was lost, which resets the credit
            return
        if self._links.unsent(node, "events") < SOFT_UNSENT_BYTES:
            remote_listeners.free()
            if self._losses:
                self._flush_soon()
        else:
            later = self._node.loop.call_later(ROOM_CHECK_S, self._look_for_room, node)
            self._room_timers[node] = later

    def _local_losses(self, loss: Loss[Any]) -> Loss[Any]:
        local = []
        for member in loss.members:
            if isinstance(member, Remote):
                lost = self._losses.setdefault(member.node, {})
                lost[member.number] = lost.get(member.number, 0) + loss.count
                self._flush_soon()
            else:
                local.append(member)
        return replace(loss, members=tuple(local))

    # ------------------------------------------------------------ responses

    def reserve(self, name: str, timeout: int, done: Done) -> None:
        """Reserve the name of a response that a request awaits here for `timeout` µs; `done` gets the error or None."""
        self.responding.reserve(name, timeout, done)

    def released(self, name: str) -> None:
        """Release the name of a response that is not awaited here any more."""
        self.responding.released(name)

    def reply(self, name: str, blob: Blob, done: Done | None) -> None:
        """Send a response to the node where it is awaited; `done` gets the error or None."""
        self.responding.reply(name, blob, done)

    # ------------------------------------------------------------ to other nodes

    def _flush_soon(self) -> None:
        if not self._flush_scheduled and not self._closed:
            self._flush_scheduled = True
            self._node.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send the other nodes what has changed in this turn."""
        self._flush_scheduled = False
        if self._closed:
            return
        changed, self._changed = self._changed, {}
        left, self._left = self._left, []
        credits = [(listener, listener.stream.exchange.credit(listener)) for listener in changed]
        for neighbour in self._neighbours.values():
            interest = neighbour.told
            forgotten = [number for number in left if interest.forget(number)]
            if not neighbour.line:
                continue
            news = [
                _listener(listener, limit)
                for listener, credit in credits
                if (limit := interest.news(listener.number, credit)) is not None
            ]
            if news or forgotten:
                self._send_interest(neighbour, news, forgotten)
        for node in [node for node in self._losses if not self._neighbour(node).known.held]:
            self._send_losses(self._neighbour(node), self._losses.pop(node))

    def _send_all_interest(self, neighbour: Neighbour) -> None:
        """Send a node all local listeners."""
        news = []
        for number, listener in self._local.items():
            credit = listener.stream.exchange.credit(listener)
            limit = neighbour.told.news(number, credit, always=True)
            assert limit is not None
            news.append(_listener(listener, limit))
        self._send_interest(neighbour, news, [], whole=True)

    def _send_interest(
        self, neighbour: Neighbour, news: list[n.Listener], left: list[int], whole: bool = False
    ) -> None:
        for begin in range(0, max(1, len(news)), MAX_FRAME_LISTENERS):
            interest = n.Interest(
                whole=whole and not begin,
                listeners=news[begin : begin + MAX_FRAME_LISTENERS],
                gone=[] if begin else left,
                line=neighbour.line,
                seen=neighbour.heard,
                more=begin + MAX_FRAME_LISTENERS < len(news),
            )
            self._links.send(neighbour.node, "events", interest)

    def _send_losses(self, neighbour: Neighbour, lost: dict[int, int]) -> None:
        parts = [n.Part(listener=number, lost=count) for number, count in lost.items()]
        for begin in range(0, len(parts), MAX_FRAME_PARTS):
            scatter = n.Scatter(parts=parts[begin : begin + MAX_FRAME_PARTS], line=neighbour.line)
            self._links.send(neighbour.node, "events", scatter)

    # ------------------------------------------------------------ from other nodes

    def up(self, peer: str) -> None:
        """Send all local listeners over a new connection to a node."""
        neighbour = self._neighbour(peer)
        neighbour.up(next(self._lines))
        self._send_all_interest(neighbour)
        self.responding.remind(peer)

    def down(self, peer: str) -> None:
        """Remove the listeners of a node whose connection is lost, until it is back."""
        self._neighbour(peer).down()
        self._losses.pop(peer, None)
        self.responding.down(peer)

    def received(self, sender: str, command: Any, blob: Blob) -> None:
        """Handle a message of another node on the lane `events`. Raise `FrameError` if it does not belong there."""
        match command:
            case n.Scatter():
                self._scatter_received(self._neighbour(sender), command, blob)
            case n.Interest():
                self._interest_received(self._neighbour(sender), command)
            case n.Reserve() | n.Reserved() | n.Release() | n.Reply() | n.Reached():
                self.responding.received(sender, command, blob)
            case p.Pong():
                pass
            case _:
                raise FrameError(f"{type(command).__name__} does not belong to the lane events")

    def _interest_received(self, neighbour: Neighbour, interest: n.Interest) -> None:
        news = [
            News(
                listener.number,
                listener.stream,
                listener.matcher,
                listener.group or None,
                listener.limit,
            )
            for listener in interest.listeners
        ]
        new = neighbour.hear(
            interest.line, interest.seen, news, interest.gone, interest.whole, interest.more
        )
        if new:
            self.responding.forget_names_of(neighbour.node)
            if neighbour.line:
                self._send_all_interest(neighbour)
                self.responding.remind(neighbour.node)

    def _scatter_received(self, neighbour: Neighbour, scatter: n.Scatter, blob: Blob) -> None:
        if scatter.line != neighbour.heard:
            return
        batches = split(blob)
        count = sum(head(batch).count for batch in batches)
        deliver = p.Deliver(topic=scatter.topic, response=scatter.response)
        if scatter.response:
            self.responding.remember(scatter.response, neighbour.node)
        for part in scatter.parts:
            if not part.first <= part.end <= count:
                raise FrameError(
                    f"messages {part.first} to {part.end} in a frame with {count} messages"
                )
            listener = self._local.get(part.listener)
            if listener is None:  # the listener has left
                continue
            lost, count_here = part.lost, part.end - part.first
            if count_here:
                neighbour.told.took(part.listener, count_here)
                taken = listener.stream.exchange.take(listener, count_here)
                lost += count_here - taken
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
