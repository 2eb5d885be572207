"""What nodes know of each other's listeners, so that the node of a publisher can decide for all of them.

A node tells every other one who listens at its own place: `News`. There each of them is a `Remote`, a member of the
stream's `Exchange` like those of its own, so that a publish is one decision. Rules:

1. Two nodes talk over two connections, one for each direction, and what was sent on one is lost with it. Each numbers
   its connections. Interest names the one it comes on (`line`) and the last one that was heard of from the other
   side (`seen`). What does not name the present one is of another time and passed over: once the other side hears
   of a new connection it tells all anew.
2. Credit is told as a *limit*: so many messages may be sent to a listener in all, on that connection. The owner
   says how many have come plus how many it is ready for; the sender counts what it has sent. So news cross
   messages on their way and nothing is counted twice: a single sender never sends more than there is room for.
3. Who owns the listener is the judge. Several senders may have been told of the same room, and it may have shrunk: what
   comes without credit is lost there, and told.
4. A limit is told anew when what the other side believes is wrong by half, and always when it is wrong about whether
   there is room at all. A client that grants half a window at a time is thus told of in time, and a message costs no
   news.
5. A listener of a stream that is not known here (yet) is kept, and takes its place when the stream appears.
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
    """A listener, as its node tells of it."""

    number: int
    stream: str
    matcher: str
    group: str | None
    limit: int


class Remote:
    """A listener of another node, among the members of a stream of this one. Compared by identity."""

    __slots__ = ("exchange", "group", "limit", "matcher", "node", "number", "sent", "stream")

    def __init__(self, node: str, news: News) -> None:
        self.node = node
        self.number = news.number
        self.stream = news.stream
        self.matcher = news.matcher
        self.group = news.group
        self.limit = news.limit
        self.sent = 0
        self.exchange: Listening | None = None  # where it has a place

    @property
    def credit(self) -> int:
        """How many may be sent to it."""
        return max(0, self.limit - self.sent)

    def __repr__(self) -> str:
        return f"Remote({self.node!r}, {self.number})"


class Told:
    """What another node was told of the listeners of this one, and what it has sent to them.

    >>> told = Told()
    >>> told.news(7, credit=100)  # it has not heard of that one
    100
    >>> told.took(7, 40)
    >>> told.news(7, credit=60)  # which is what it believes
    >>> told.news(7, credit=160)
    200
    """

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}
        self._limits: dict[int, int] = {}

    def believed(self, number: int) -> int:
        """How much room there is for all it knows, when all it has sent has come."""
        return max(0, self._limits[number] - self._taken.get(number, 0))

    def news(self, number: int, credit: int, always: bool = False) -> int | None:
        """The limit to tell it, if that is worth while."""
        if number in self._limits and not always:
            believed = self.believed(number)
            some = bool(believed), bool(credit)
            if some == (False, False) or (
                some == (True, True) and believed < 2 * credit and credit < 2 * believed
            ):
                return None
        limit = self._limits[number] = self._taken.get(number, 0) + credit
        return limit

    def took(self, number: int, count: int) -> None:
        """So many have come from it."""
        self._taken[number] = self._taken.get(number, 0) + count

    def forget(self, number: int) -> bool:
        """That one has left: whether it has to be told."""
        self._taken.pop(number, None)
        return self._limits.pop(number, None) is not None

    def clear(self) -> None:
        """It has a new connection, and knows nothing."""
        self._taken.clear()
        self._limits.clear()


class Known:
    """The listeners of another node, as far as it has told."""

    def __init__(self, node: str, exchange_of: Callable[[str], Listening | None]) -> None:
        self.node = node
        self.held = False
        """Whether nothing is to be sent there for the time being."""
        self._exchange_of = exchange_of
        self._remotes: dict[int, Remote] = {}
        self._streams: dict[str, dict[int, Remote]] = {}
        self._unnamed: set[int] = set()  # while all of it is being told: who was not named yet

    def __len__(self) -> int:
        return len(self._remotes)

    def get(self, number: int) -> Remote | None:
        """A listener by its number."""
        return self._remotes.get(number)

    def tell(self, news: Iterable[News], gone: Iterable[int], whole: bool, more: bool) -> None:
        """What has changed; or all there is (`whole`), which goes on with what comes next (`more`)."""
        if whole:
            self._unnamed = set(self._remotes)
        for one in news:
            self._unnamed.discard(one.number)
            remote = self._remotes.get(one.number)
            if remote is None:
                remote = self._remotes[one.number] = Remote(self.node, one)
                self._streams.setdefault(one.stream, {})[one.number] = remote
                exchange = self._exchange_of(one.stream)
                if exchange is not None:
                    self._place(remote, exchange)
            else:
                remote.limit = one.limit
                self._set_credit(remote)
        for number in gone:
            self._forget(number)
        if not more:
            for number in self._unnamed:
                self._forget(number)
            self._unnamed = set()

    def appeared(self, stream: str, exchange: Listening) -> None:
        """There is such a stream now."""
        for remote in self._streams.get(stream, {}).values():
            if remote.exchange is None:
                self._place(remote, exchange)

    def vanished(self, stream: str) -> None:
        """There is no such stream any more; one of that name may come."""
        for remote in self._streams.get(stream, {}).values():
            self._displace(remote)

    def hold(self) -> None:
        """Too much waits on the way there: nobody gets anything more."""
        self.held = True
        for remote in self._remotes.values():
            self._set_credit(remote)

    def free(self) -> None:
        """There is room again."""
        self.held = False
        for remote in self._remotes.values():
            self._set_credit(remote)

    def clear(self) -> None:
        """The connection is lost: nobody can be reached."""
        for remote in self._remotes.values():
            self._displace(remote)
        self._remotes.clear()
        self._streams.clear()
        self._unnamed = set()
        self.held = False

    def _place(self, remote: Remote, exchange: Listening) -> None:
        with contextlib.suppress(RailgunError):  # a matcher of a later version: it gets nothing
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
        of = self._streams[remote.stream]
        del of[number]
        if not of:
            del self._streams[remote.stream]

    def validate(self) -> None:
        """The tables agree with each other."""
        assert self._remotes == {n: r for of in self._streams.values() for n, r in of.items()}
        assert all(self._streams.values())
        for remote in self._remotes.values():
            if remote.exchange is not None:
                expected = 0 if self.held else remote.credit
                assert remote.exchange.credit(remote) == expected, remote


class Neighbour:
    """Another node: the connections both ways, what it was told, and what it has told."""

    def __init__(self, node: str, exchange_of: Callable[[str], Listening | None]) -> None:
        self.node = node
        self.line = 0
        """The connection to it; 0: there is none."""
        self.heard = 0
        """The last one from it."""
        self.told = Told()
        self.known = Known(node, exchange_of)

    def up(self, line: int) -> None:
        """There is a connection to it, and it has to be told everything."""
        self.line = line

    def down(self) -> None:
        """There is none any more."""
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
        """Its interest has come. Whether that was on a new connection: then it has to be told everything."""
        new = line != self.heard
        if new:
            self.heard = line
            self.told.clear()
        if self.line and seen == self.line:
            self.known.tell(news, gone, whole, more)
        return new
