"""Serve responses across the nodes of a cluster: keep their names unique, and route answers to the requester.

Rules:

1. A response is awaited at the requester's node (`Node.responses`), where the first answer wins, the timeout runs, and
   the requester gets the outcome. Before the request goes out, the node that keeps the name
   (`broker.protocol.response_names`) has reserved it.
2. A keeper that is lost meanwhile is replaced by the next one. A keeper that is connected and does not answer in time
   refuses the request: UNREACHABLE, nothing was sent. When nodes come or go, awaited names are reported to their new
   keepers.
3. An answer that is not awaited on this node goes to the node from which the request came or, if that is not known any
   more, to the keeper of the name, which passes it on: two hops at most. The responder gets the outcome.
4. All waits end: by an answer, by the loss of the connection, or after `ANSWER_TIMEOUT_S`.
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

ANSWER_TIMEOUT_S: Final = 2.0
GRACE_US: Final = 10 * SECOND  # a name is kept this much longer than its response is awaited
MAX_HOMES: Final = 50_000  # responses whose home is remembered

Done = Callable[[RailgunError | None], None]


@dataclass(frozen=True, slots=True)
class _Wait:
    """An answer that is awaited from another node."""

    peer: str
    deadline: float
    done: Callable[[Any], None]  # gets the answer, or a PeerError


class Responding:
    """The part of a node in the responses of a cluster."""

    def __init__(
        self, node: Node, links: Links, me: str, reachable: Callable[[], Iterable[str]]
    ) -> None:
        self.names = Names()
        """The names that this node keeps for others."""
        self._node, self._links, self._me, self._reachable = node, links, me, reachable
        # Names awaited here: keeper and deadline in µs.
        self._awaited: dict[str, tuple[str, int]] = {}
        self._homes: dict[str, str] = {}  # names awaited elsewhere, by requests that came here
        self._waits: dict[int, _Wait] = {}  # by deadline, earliest first
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ names

    def reserve(self, name: str, timeout: int, done: Done) -> None:
        """Reserve a name for a response that is awaited here for `timeout` µs; `done` gets None, or the error."""
        keeper = keeper_of(name, (self._me, *self._reachable()))
        self._awaited[name] = keeper, _now_us() + timeout
        if keeper == self._me:
            home = self.names.home(name)
            done(None if home is None else _exists_error(name))
            return

        def answered(outcome: n.Reserved | PeerError) -> None:
            if isinstance(outcome, n.Reserved):
                done(None if outcome.ok else _exists_error(name))
            elif keeper not in self._reachable() and name in self._awaited:
                self.reserve(name, timeout, done)
            else:
                done(outcome)

        self._ask(keeper, n.Reserve(response=name, timeout=timeout), (), answered)

    def released(self, name: str) -> None:
        """Release a name that is no longer awaited here."""
        kept = self._awaited.pop(name, None)
        if kept is not None and kept[0] != self._me:
            self._send(kept[0], n.Release(response=name))

    def remind(self, peer: str) -> None:
        """Report names to their keepers, because node `peer` is new, or may have forgotten its names."""
        now, nodes = _now_us(), (self._me, *self._reachable())
        for name, (old_keeper, deadline) in self._awaited.items():
            keeper = keeper_of(name, nodes)
            if keeper == old_keeper != peer:
                continue
            self._awaited[name] = keeper, deadline  # replaces a value, so the size stays the same
            if keeper != self._me:
                self._send(keeper, n.Reserve(response=name, timeout=max(0, deadline - now)))
            if old_keeper not in (keeper, self._me):
                self._send(old_keeper, n.Release(response=name))

    def _reserve(self, sender: str, request: n.Reserve) -> None:
        now = _now_us()
        name, until = request.response, now + request.timeout + GRACE_US
        ok = name not in self._node.responses and self.names.reserve(name, sender, until, now)
        if request.request:
            self._send(sender, n.Reserved(request=request.request, ok=ok))

    # ------------------------------------------------------------ answers

    def remember(self, name: str, home: str) -> None:
        """Remember that the request `name` came from the node `home`."""
        self._homes.pop(name, None)
        self._homes[name] = home
        if len(self._homes) > MAX_HOMES:
            del self._homes[next(iter(self._homes))]

    def reply(self, name: str, blob: Blob, done: Done | None) -> None:
        """Answer a response that is not awaited here; `done`, if given, gets None, or the error."""
        reply = n.Reply(response=name, forwarded=True)
        reachable = tuple(self._reachable())
        target = self._homes.pop(name, None)
        if target not in reachable:  # unknown, or perhaps reachable through a third node
            target = keeper_of(name, (self._me, *reachable))
            if target == self._me:
                target = self.names.home(name)
            else:
                reply.forwarded = False
        if target is None or target not in reachable:
            if done is not None:
                done(_gone_error(name))
        elif done is None:
            self._send(target, reply, [blob])
        else:
            on_outcome = done

            def reached(outcome: n.Reached | PeerError) -> None:
                if isinstance(outcome, PeerError):
                    on_outcome(outcome)
                else:
                    on_outcome(PeerError(outcome.code, outcome.text) if outcome.code else None)

            self._ask(target, reply, [blob], reached)

    def _replied(self, sender: str, reply: n.Reply, blob: Blob) -> None:
        name = reply.response
        error: RailgunError | None = None
        session = self._node.responses.whose(name)
        if session is not None:
            self._node.responses.answer(name)
            session.respond(name, p.Response(), [blob])
        else:
            home = None if reply.forwarded else self.names.home(name)
            if home is not None and home != sender and home in self._reachable():
                self._pass_on(sender, reply, blob, home)
                return
            error = _gone_error(name)
        self._send_outcome(sender, reply.request, error)

    def _pass_on(self, sender: str, reply: n.Reply, blob: Blob, home: str) -> None:
        passed = n.Reply(response=reply.response, forwarded=True)
        if not reply.request:
            self._send(home, passed, [blob])
            return

        def reached(outcome: n.Reached | PeerError) -> None:
            if isinstance(outcome, PeerError):
                self._send_outcome(sender, reply.request, outcome)
            else:
                outcome.request = reply.request
                self._send(sender, outcome)

        self._ask(home, passed, [blob], reached)

    def _send_outcome(self, to: str, request: int, error: RailgunError | None) -> None:
        if request:
            reached = n.Reached(request=request)
            if error is not None:
                reached.code, reached.text = getattr(error, "code", "REFUSED"), str(error)
            self._send(to, reached)

    # ------------------------------------------------------------ other nodes

    def received(self, sender: str, command: Any, blob: Blob) -> None:
        """Handle a message of another node."""
        match command:
            case n.Reserve():
                self._reserve(sender, command)
            case n.Release():
                self.names.release(command.response, sender)
            case n.Reply():
                self._replied(sender, command, blob)
            case n.Reserved() | n.Reached():
                wait = self._waits.get(command.request)
                if wait is not None and wait.peer == sender:  # otherwise the answer comes too late
                    del self._waits[command.request]
                    wait.done(command)

    def forget_names_of(self, peer: str) -> None:
        """Forget the names of a node whose connection is new: it is about to report those it still needs."""
        self.names.gone(peer)

    def down(self, peer: str) -> None:
        """Forget the names of an unreachable node, and fail what was awaited from it."""
        self.names.gone(peer)
        lost = PeerError("UNREACHABLE", f"the connection to node {peer} was lost")
        for number in [number for number, wait in self._waits.items() if wait.peer == peer]:
            wait = self._waits.pop(number, None)
            if wait is not None:
                wait.done(lost)
        self.remind(peer)

    def close(self) -> None:
        """Stop waiting for answers."""
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
        self._waits[number] = _Wait(to, self._node.loop.time() + ANSWER_TIMEOUT_S, done)
        if self._timer is None:
            self._timer = self._node.loop.call_later(ANSWER_TIMEOUT_S, self._check_timeouts)

    def _check_timeouts(self) -> None:
        """Fail the waits whose timeout is over."""
        now, self._timer = self._node.loop.time(), None
        late = itertools.takewhile(lambda entry: entry[1].deadline <= now, self._waits.items())
        for number, wait in list(late):
            del self._waits[number]
            wait.done(PeerError("UNREACHABLE", f"node {wait.peer} did not answer in time"))
        if self._waits and self._timer is None:
            first = next(iter(self._waits.values()))
            self._timer = self._node.loop.call_later(
                max(0.0, first.deadline - now), self._check_timeouts
            )


def _exists_error(name: str) -> RsExistsError:
    return RsExistsError(f"a response is already awaited as {name!r}: use a unique name")


def _gone_error(name: str) -> RsGoneError:
    return RsGoneError(
        f"no response is awaited as {name!r}: answered, timed out, or its requester left"
    )


def _now_us() -> int:
    """Return the monotonic time in µs."""
    return time.monotonic_ns() // 1000
