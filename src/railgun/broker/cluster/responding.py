"""Responses across the nodes of a cluster: names that are used once, and answers that find who asked.

Rules:

1. A response is awaited at the node of who asked (`Node.responses`), where the first answer wins, its time runs, and
   who asked is told. Before the request goes out, the node that keeps the name (`broker.protocol.response_names`) has
   given it.
2. A keeper that is lost meanwhile is replaced by the next. One that is there and does not answer in time refuses the
   request: UNREACHABLE, nothing was sent. When nodes come or go, names that are awaited are told to those who keep
   them now.
3. An answer that nobody awaits here goes to the node the request came from, or, where nobody remembers that, to the
   keeper of the name, which passes it on: two hops at most. Who answered hears what became of it.
4. All waits end: by an answer, by the loss of the connection, or after `PATIENCE`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message

from railgun.broker.cluster.links import Links, PeerError
from railgun.broker.protocol.exchange import RsExistsError, RsGoneError
from railgun.broker.protocol.response_names import Names, keeper_of
from railgun.broker.settings import SECOND
from railgun.broker.streams.node import Node
from railgun.errors import RailgunError
from railgun.transport.commands import Blob
from railgun.transport.proto import cluster_pb2 as n
from railgun.transport.proto import streams_pb2 as p

PATIENCE: Final = 2.0
GRACE: Final = 10 * SECOND  # a name is kept longer than its response is awaited
MOST_HOMES: Final = 50_000  # responses whose home is remembered

Done = Callable[[RailgunError | None], None]


@dataclass(frozen=True, slots=True)
class _Wait:
    """An answer that is awaited from another node."""

    peer: str
    deadline: float
    done: Callable[[Any], None]  # gets the answer, or a PeerError


class Responding:
    """The part of a node in the responses of a cluster; `up`: the other nodes that can be reached."""

    def __init__(self, node: Node, links: Links, me: str, up: Callable[[], Iterable[str]]) -> None:
        self.names = Names()
        """What this node keeps for others."""
        self._node, self._links, self._me, self._up = node, links, me, up
        self._kept: dict[str, tuple[str, int]] = {}  # what is awaited here: its keeper, how long
        self._homes: dict[str, str] = {}  # what is awaited elsewhere, by requests that came here
        self._waits: dict[int, _Wait] = {}  # those that end first are first
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ names

    def reserve(self, name: str, timeout: int, done: Done) -> None:
        """A response is awaited here under this name (µs): `done` hears whether it may be."""
        keeper = keeper_of(name, (self._me, *self._up()))
        self._kept[name] = keeper, _now() + timeout
        if keeper == self._me:
            home = self.names.home(name)
            done(None if home is None else _exists(name))
            return

        def answered(outcome: n.Reserved | PeerError) -> None:
            if isinstance(outcome, n.Reserved):
                done(None if outcome.ok else _exists(name))
            elif keeper not in self._up() and name in self._kept:
                self.reserve(name, timeout, done)
            else:
                done(outcome)

        self._ask(keeper, n.Reserve(response=name, timeout=timeout), (), answered)

    def released(self, name: str) -> None:
        """It is not awaited here any more."""
        kept = self._kept.pop(name, None)
        if kept is not None and kept[0] != self._me:
            self._send(kept[0], n.Release(response=name))

    def remind(self, peer: str) -> None:
        """That node is new, or may have forgotten: it hears of the names it is to keep."""
        now, nodes = _now(), (self._me, *self._up())
        for name, (was, deadline) in self._kept.items():
            keeper = keeper_of(name, nodes)
            if keeper == was != peer:
                continue
            self._kept[name] = keeper, deadline  # which does not change the size
            if keeper != self._me:
                self._send(keeper, n.Reserve(response=name, timeout=max(0, deadline - now)))
            if was not in (keeper, self._me):
                self._send(was, n.Release(response=name))

    def _reserve(self, sender: str, asked: n.Reserve) -> None:
        now = _now()
        name, until = asked.response, now + asked.timeout + GRACE
        ok = name not in self._node.responses and self.names.reserve(name, sender, until, now)
        if asked.request:
            self._send(sender, n.Reserved(request=asked.request, ok=ok))

    # ------------------------------------------------------------ answers

    def remember(self, name: str, home: str) -> None:
        """A request came from that node."""
        self._homes.pop(name, None)
        self._homes[name] = home
        if len(self._homes) > MOST_HOMES:
            del self._homes[next(iter(self._homes))]

    def reply(self, name: str, blob: Blob, done: Done | None) -> None:
        """Answer a response that is not awaited here; `done`, if any, hears whether it was in time."""
        reply = n.Reply(response=name, forwarded=True)
        up = tuple(self._up())
        to = self._homes.pop(name, None)
        if to not in up:  # it was never known, or a third node may reach it
            to = keeper_of(name, (self._me, *up))
            if to == self._me:
                to = self.names.home(name)
            else:
                reply.forwarded = False
        if to is None or to not in up:
            if done is not None:
                done(_gone(name))
        elif done is None:
            self._send(to, reply, [blob])
        else:
            heard = done

            def reached(outcome: n.Reached | PeerError) -> None:
                if isinstance(outcome, PeerError):
                    heard(outcome)
                else:
                    heard(PeerError(outcome.code, outcome.text) if outcome.code else None)

            self._ask(to, reply, [blob], reached)

    def _replied(self, sender: str, reply: n.Reply, blob: Blob) -> None:
        name = reply.response
        error: RailgunError | None = None
        session = self._node.responses.whose(name)
        if session is not None:
            self._node.responses.answer(name)
            session.respond(name, p.Response(), [blob])
        else:
            home = None if reply.forwarded else self.names.home(name)
            if home is not None and home != sender and home in self._up():
                self._pass_on(sender, reply, blob, home)
                return
            error = _gone(name)
        self._reach(sender, reply.request, error)

    def _pass_on(self, sender: str, reply: n.Reply, blob: Blob, home: str) -> None:
        passed = n.Reply(response=reply.response, forwarded=True)
        if not reply.request:
            self._send(home, passed, [blob])
            return

        def reached(outcome: n.Reached | PeerError) -> None:
            if isinstance(outcome, PeerError):
                self._reach(sender, reply.request, outcome)
            else:
                outcome.request = reply.request
                self._send(sender, outcome)

        self._ask(home, passed, [blob], reached)

    def _reach(self, to: str, request: int, error: RailgunError | None) -> None:
        if request:
            told = n.Reached(request=request)
            if error is not None:
                told.code, told.text = getattr(error, "code", "REFUSED"), str(error)
            self._send(to, told)

    # ------------------------------------------------------------ other nodes

    def received(self, sender: str, command: Any, blob: Blob) -> None:
        """Another node has said something."""
        match command:
            case n.Reserve():
                self._reserve(sender, command)
            case n.Release():
                self.names.release(command.response, sender)
            case n.Reply():
                self._replied(sender, command, blob)
            case n.Reserved() | n.Reached():
                wait = self._waits.get(command.request)
                if wait is not None and wait.peer == sender:  # else it comes too late
                    del self._waits[command.request]
                    wait.done(command)

    def anew(self, peer: str) -> None:
        """That node has a new connection to this one, and is about to tell which names it still needs."""
        self.names.gone(peer)

    def down(self, peer: str) -> None:
        """That node cannot be reached: so much for its names, and what was awaited from it."""
        self.names.gone(peer)
        lost = PeerError("UNREACHABLE", f"the connection to node {peer} was lost")
        for number in [number for number, wait in self._waits.items() if wait.peer == peer]:
            wait = self._waits.pop(number, None)
            if wait is not None:
                wait.done(lost)
        self.remind(peer)

    def close(self) -> None:
        """Wait for nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self._waits.clear()

    def _send(self, to: str, command: Message, blobs: Sequence[Blob] = ()) -> None:
        self._links.send(to, "events", command, blobs)

    def _ask(
        self, to: str, command: Any, blobs: Sequence[Blob], done: Callable[[Any], None]
    ) -> None:
        number = command.request = next(self._numbers)
        if not self._links.send(to, "events", command, blobs):
            done(PeerError("UNREACHABLE", f"there is no connection to node {to}"))
            return
        self._waits[number] = _Wait(to, self._node.loop.time() + PATIENCE, done)
        if self._timer is None:
            self._timer = self._node.loop.call_later(PATIENCE, self._look)

    def _look(self) -> None:
        """Who waits has waited long enough, perhaps."""
        now, self._timer = self._node.loop.time(), None
        late = itertools.takewhile(lambda one: one[1].deadline <= now, self._waits.items())
        for number, wait in list(late):
            del self._waits[number]
            wait.done(PeerError("UNREACHABLE", f"node {wait.peer} did not answer in time"))
        if self._waits and self._timer is None:
            first = next(iter(self._waits.values()))
            self._timer = self._node.loop.call_later(max(0.0, first.deadline - now), self._look)


def _exists(name: str) -> RsExistsError:
    return RsExistsError(f"a response is awaited as {name!r} already: use a name of your own")


def _gone(name: str) -> RsGoneError:
    return RsGoneError(
        f"no response is awaited as {name!r}: answered, timed out, or its requester left"
    )


def _now() -> int:
    """In µs; it never jumps, and means nothing by itself."""
    return time.monotonic_ns() // 1000
