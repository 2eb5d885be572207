"""Interest: what nodes know of each other's listeners, so that a publisher's node can route to all of them.

Each node sends every other node the listeners it owns, as `News`. The receiver represents each as a `Remote`, a member
of the stream's `Exchange` like its own listeners, so that a publish is one decision. Rules:

1. Two nodes talk over two connections, one for each direction, and what was sent on one is lost with it. Each node
   numbers its connections. Interest names the connection it comes on (`line`) and the last connection its sender has
   heard of from the other side (`seen`). Interest that does not name the present connection is outdated and ignored:
   once the other side hears of a new connection, it sends all its interest again.
2. Credit is sent as a *limit*: the total number of messages that may be sent to a listener on that connection. The
   owner sends how many have arrived plus how many it is ready for; the sender counts what it has sent. So news and
   messages may cross on their way and nothing is counted twice: a single sender never sends more than there is room
   for.
3. The owner of the listener decides. Several senders may each have a limit for the same room, and the room may
   have shrunk: messages that arrive without credit are lost there, and reported.
4. A limit is sent again when the other side's view of the credit is wrong by half, and always when it is wrong about
   whether there is any. So a client that grants half a window at a time is announced in time, and a message costs no
   news.
5. A listener of a stream that is not known here (yet) is kept, and gets its place when the stream appears.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from railgun.broker.protocol.exchange import Exchange
from railgun.errors import RailgunError

Listening = Exchange[Any, Any]


@dataclass(frozen=True, slots=True)
class News:
    """A listener, as announced by the node that owns it."""

    number: int
    stream: str
    matcher: str
    group: str | None
    limit: int


class Remote:
    """A listener of another node, among the members of a stream of this node. Compared by identity."""

    __slots__ = ("exchange", "group", "limit", "matcher", "node", "number", "sent", "stream")

    def __init__(self, node: str, news: News) -> None:
        self.node = node
        self.number = news.number
        self.stream = news.stream
        self.matcher = news.matcher
        self.group = news.group
        self.limit = news.limit
        self.sent = 0
        self.exchange: Listening | None = None  # the exchange in which it is a member

    @property
    def credit(self) -> int:
        """Return how many more messages may be sent to the listener."""
        return max(0, self.limit - self.sent)

    def __repr__(self) -> str:
        return f"Remote({self.node!r}, {self.number})"


class SentInterest:
    """The interest sent to another node, and how many messages have come from it for each listener.

    >>> sent = SentInterest()
    >>> sent.news(7, credit=100)  # listener 7 is new to it
    100
    >>> sent.took(7, 40)
    >>> sent.news(7, credit=60)  # equals the other node's view
    >>> sent.news(7, credit=160)
    200
    """

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}
        self._limits: dict[int, int] = {}

    def believed(self, number: int) -> int:
        """Return the credit as the other node sees it, once all it has sent has arrived."""
        return max(0, self._limits[number] - self._taken.get(number, 0))

    def news(self, number: int, credit: int, always: bool = False) -> int | None:
        """Return the limit to send for a listener, or None if the other node's view is good enough (rule 4)."""
        if number in self._limits and not always:
            believed = self.believed(number)
            if not believed and not credit:
                return None
            if believed and credit and believed < 2 * credit and credit < 2 * believed:
                return None
        limit = self._limits[number] = self._taken.get(number, 0) + credit
        return limit

    def took(self, number: int, count: int) -> None:
        """Count messages that have come from the other node for a listener."""
        self._taken[number] = self._taken.get(number, 0) + count

    def forget(self, number: int) -> bool:
        """Remove a listener that has left. Return whether the other node knows of it."""
        self._taken.pop(number, None)
        return self._limits.pop(number, None) is not None

    def clear(self) -> None:
        """Forget everything: the other node has a new connection, and knows nothing."""
        self._taken.clear()
        self._limits.clear()


class ReceivedInterest:
    """The listeners of another node, as far as it has announced them."""

    def __init__(self, node: str, exchange_of: Callable[[str], Listening | None]) -> None:
        self.node = node
        self.held = False
        """Whether sending to the other node is suspended."""
        self._exchange_of = exchange_of
        self._remotes: dict[int, Remote] = {}
        self._streams: dict[str, dict[int, Remote]] = {}
        self._unnamed: set[int] = set()  # during a full announcement: listeners not named so far

    def __len__(self) -> int:
        return len(self._remotes)

    def get(self, number: int) -> Remote | None:
        """Return the listener of this number, or None."""
        return self._remotes.get(number)

    def tell(self, news: Iterable[News], gone: Iterable[int], whole: bool, more: bool) -> None:
        """Apply changes to the listeners.

        `whole`: the news are a full announcement, which continues with the next call if `more`; `gone`: listeners that
        left.
        """
        if whole:
            self._unnamed = set(self._remotes)
        for item in news:
            self._unnamed.discard(item.number)
            remote = self._remotes.get(item.number)
            if remote is None:
                remote = self._remotes[item.number] = Remote(self.node, item)
                self._streams.setdefault(item.stream, {})[item.number] = remote
                exchange = self._exchange_of(item.stream)
                if exchange is not None:
                    self._place(remote, exchange)
            else:
                remote.limit = item.limit
                self._set_credit(remote)
        for number in gone:
            self._forget(number)
        if not more:
            for number in self._unnamed:
                self._forget(number)
            self._unnamed = set()

    def appeared(self, stream: str, exchange: Listening) -> None:
        """Make the listeners of a stream that was created members of its exchange."""
        for remote in self._streams.get(stream, {}).values():
            if remote.exchange is None:
                self._place(remote, exchange)

    def vanished(self, stream: str) -> None:
        """Remove the listeners of a deleted stream from its exchange, but keep them: the stream may come back."""
        for remote in self._streams.get(stream, {}).values():
            self._displace(remote)

    def hold(self) -> None:
        """Suspend sending: too much is queued for the other node."""
        self.held = True
        for remote in self._remotes.values():
            self._set_credit(remote)

    def free(self) -> None:
        """Resume sending: the queue has room again."""
        self.held = False
        for remote in self._remotes.values():
            self._set_credit(remote)

    def clear(self) -> None:
        """Remove all listeners: the connection is lost, and none can be reached."""
        for remote in self._remotes.values():
            self._displace(remote)
        self._remotes.clear()
        self._streams.clear()
        self._unnamed = set()
        self.held = False

    def _place(self, remote: Remote, exchange: Listening) -> None:
        # A matcher of a later version may be refused: then the listener gets nothing.
        with contextlib.suppress(RailgunError):
            exchange.subscribe(remote, remote.matcher, remote.group)
            remote.exchange = exchange
            self._set_credit(remote)

    def _displace(self, remote: Remote) -> None:
        if remote.exchange is not None:
            remote.exchange.leave(remote)
            remote.exchange = None

    def _set_credit(self, remote: Remote) -> None:
        if remote.exchange is not None:
            remote.exchange.set_credit(remote, 0 if self.held else remote.credit)

    def _forget(self, number: int) -> None:
        remote = self._remotes.pop(number, None)
        if remote is None:
            return
        self._displace(remote)
        listeners = self._streams[remote.stream]
        del listeners[number]
        if not listeners:
            del self._streams[remote.stream]

    def validate(self) -> None:
        """Assert that the tables agree with each other."""
        placed = [pair for remotes in self._streams.values() for pair in remotes.items()]
        assert self._remotes == dict(placed)
        assert all(self._streams.values())
        for remote in self._remotes.values():
            if remote.exchange is not None:
                expected = 0 if self.held else remote.credit
                assert remote.exchange.credit(remote) == expected, remote


class Neighbour:
    """Another node: the connections in both directions, and the interest sent and received."""

    def __init__(self, node: str, exchange_of: Callable[[str], Listening | None]) -> None:
        self.node = node
        self.line = 0
        """The number of the connection to it; 0: not connected."""
        self.heard = 0
        """The number of the last connection from it."""
        self.told = SentInterest()
        self.known = ReceivedInterest(node, exchange_of)

    def up(self, line: int) -> None:
        """Record a new connection to the node, on which everything has to be announced."""
        self.line = line

    def down(self) -> None:
        """Record that the connection to the node is lost."""
        self.line = 0
        self.known.clear()

    def hear(
        self,
        line: int,
        seen: int,
        news: Iterable[News],
        gone: Iterable[int] = (),
        whole: bool = False,
        more: bool = False,
    ) -> bool:
        """Handle interest from the node. Return whether it came on a new connection: then announce everything again."""
        new = line != self.heard
        if new:
            self.heard = line
            self.told.clear()
        if self.line and seen == self.line:
            self.known.tell(news, gone, whole, more)
        return new
