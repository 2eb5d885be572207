"""Who gets the messages of an ephemeral stream, and who is waiting for a response.

**An ephemeral stream** stores nothing: a message goes to those who listen now. Rules of an `Exchange`:

1. A message goes once to every *entity* with a matcher that fits its topic: a consumer of its own, or a group. The
   receipt tells how many those are; if there are none, the message is dropped.
2. In a group it goes to one of the members whose matchers fit and that have credit: the one with the most, and among
   equals the one that was served the longest ago. Who has no credit is not asked: a slow or stuck member costs nothing.
3. Credit is how many messages a member is ready to take. Whoever has too little for a publish gets the beginning of
   it and loses the newest, which are counted and told; the publisher is never held up. A group loses only what none
   of its members can take, and that counts for the group.
4. A publish of many messages is one decision, with the same outcome as if they had come one by one: as many for each
   member and the same turns afterwards. Each member of a group gets one range of it, so the messages of a publisher
   reach each subscriber in the order in which they were published, if the driver sends what it is told in
   the order in which it is told.
5. There is nothing to acknowledge: ack and nack are errors.

**A response stream** is a name under which one message is awaited. Rules of `Responses`:

1. A request opens it, with a deadline; a name that is open cannot be opened again.
2. The first message wins and removes it; all later ones find it gone. So there is one outcome: an answer, a timeout
   told by the node, nobody who could answer, or a requester that went away. An answer that comes after the deadline
   but before the timeout was told still wins.
3. Nobody can subscribe to it: the requester is its one subscriber, and what it awaits ends with it.

The driver of both opens the response before it routes the request; if `matched` is 0 it closes it and
answers NO_CONSUMERS.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar, Final, Generic, NoReturn, TypeVar

from railgun.broker.protocol.topics import ALL, Matchers
from railgun.errors import ProtocolError, RailgunError

M = TypeVar("M", bound=Hashable)  # what a driver calls a member
P = TypeVar("P", bound=Hashable)  # what a driver calls a publisher

_SPARE: Final = 64  # deadlines of what has ended, kept before it is worth while to look for them


class NotMemberError(RailgunError, LookupError):
    """It does not listen to this stream: it never subscribed, or it left."""

    code: ClassVar[str] = "NOT_MEMBER"


class AlreadyMemberError(RailgunError):
    """It listens to this stream already; to change its matcher or group, it leaves first."""

    code: ClassVar[str] = "ALREADY_MEMBER"


class NoAcksError(RailgunError):
    """An ack or nack on an ephemeral stream, where a message is gone once it is sent."""

    code: ClassVar[str] = "NO_ACKS"


class RsExistsError(RailgunError):
    """A response is awaited under this name already."""

    code: ClassVar[str] = "RS_EXISTS"


class RsGoneError(RailgunError, LookupError):
    """No response is awaited under this name: answered, timed out, or its requester left."""

    code: ClassVar[str] = "RS_GONE"


@dataclass(frozen=True, slots=True)
class Send(Generic[M]):
    """Messages [first, end) of the publish go to this member."""

    member: M
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Loss(Generic[M]):
    """The newest messages of the publish are lost to this entity; these are to be told."""

    members: tuple[M, ...]  # a consumer of its own, or the members of a group whose matchers fit
    group: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Routing(Generic[M, P]):
    """What becomes of a publish; `matched` is for its receipt."""

    publisher: P
    count: int
    matched: int  # entities
    sends: tuple[Send[M], ...] = ()
    losses: tuple[Loss[M], ...] = ()

    @property
    def sent(self) -> int:
        """Copies of messages in all."""
        return sum(send.end - send.first for send in self.sends)


class _Seat(Generic[M]):
    """A member and what it is ready for. Seats are compared by identity, which makes looking them up cheap."""

    __slots__ = ("credit", "lost", "matcher", "member", "served", "team")

    def __init__(self, member: M, matcher: str, team: _Team[M] | None, served: int) -> None:
        self.member = member
        self.matcher = matcher
        self.team = team
        self.credit = 0
        self.served = served  # its turn: the lowest was served the longest ago
        self.lost = 0


class _Team(Generic[M]):
    """A group."""

    __slots__ = ("lost", "name", "seats")

    def __init__(self, name: str) -> None:
        self.name = name
        self.seats: dict[M, _Seat[M]] = {}
        self.lost = 0


class Exchange(Generic[M, P]):
    """The members of one ephemeral stream.

    >>> exchange = Exchange[str, str]()
    >>> exchange.subscribe("ann", "orders.#")
    >>> exchange.subscribe("bob", group="printers")
    >>> exchange.subscribe("cy", group="printers")
    >>> for member, credit in {"ann": 4, "bob": 7, "cy": 10}.items():
    ...     exchange.grant(member, credit)
    >>> routing = exchange.publish("shop", "orders.eu", count=5)
    >>> routing.matched
    2
    >>> for send in routing.sends:
    ...     send
    Send(member='ann', first=0, end=4)
    Send(member='cy', first=0, end=4)
    Send(member='bob', first=4, end=5)
    >>> routing.losses
    (Loss(members=('ann',), group=None, count=1),)
    """

    def __init__(self) -> None:
        self._seats: dict[M, _Seat[M]] = {}
        self._teams: dict[str, _Team[M]] = {}
        self._matchers: Matchers[_Seat[M]] = Matchers()
        self._turns = 0

    def __len__(self) -> int:
        return len(self._seats)

    def subscribe(self, member: M, matcher: str = ALL, group: str | None = None) -> None:
        """It listens, without credit at first; in a group its turn comes after those who are there."""
        if member in self._seats:
            raise AlreadyMemberError(
                f"{member!r} listens to this stream already: let it leave first"
            )
        team = None if group is None else self._teams.get(group) or _Team(group)
        seat = _Seat(member, matcher, team, self._turns)
        self._matchers.add(matcher, seat)  # or it is a bad one, and nothing changed
        self._turns += 1
        self._seats[member] = seat
        if team is not None:
            self._teams[team.name] = team
            team.seats[member] = seat

    def leave(self, member: M) -> None:
        """It no longer listens; what was sent to it and not received is lost, as ever."""
        seat = self._seat(member)
        del self._seats[member]
        self._matchers.remove(seat.matcher, seat)
        if seat.team is not None:
            del seat.team.seats[member]
            if not seat.team.seats:
                del self._teams[seat.team.name]

    def grant(self, member: M, n: int) -> None:
        """It is ready for so many more."""
        if n < 0:
            raise ProtocolError(
                f"{member!r} grants {n} messages: credit is given, never taken back"
            )
        self._seat(member).credit += n

    def credit(self, member: M) -> int:
        """For how many messages it is ready."""
        return self._seat(member).credit

    def set_credit(self, member: M, credit: int) -> None:
        """For so many it is ready, as others say who know it better."""
        self._seat(member).credit = credit

    def take(self, member: M, count: int) -> int:
        """Others have chosen it for so many: how many it has credit for. The rest is lost to its entity."""
        seat = self._seat(member)
        taken = min(seat.credit, count)
        if taken:
            seat.credit -= taken
            seat.served = self._turns
            self._turns += 1
        (seat if seat.team is None else seat.team).lost += count - taken
        return taken

    def lost(self, member: M) -> int:
        """How many its entity has lost: itself, or its group as long as that has had members."""
        seat = self._seat(member)
        return seat.lost if seat.team is None else seat.team.lost

    def members(self, group: str | None = None) -> tuple[M, ...]:
        """Who listens, or listens in this group, in the order in which they came."""
        if group is None:
            return tuple(self._seats)
        return tuple(self._teams[group].seats) if group in self._teams else ()

    def ack(self, member: M) -> NoReturn:
        """Refused, and so is a nack: there is nothing that could be sent again."""
        raise NoAcksError(f"{member!r} acks or nacks on an ephemeral stream: leave it out")

    def publish(self, publisher: P, topic: str = "", count: int = 1) -> Routing[M, P]:
        """Where so many messages of one topic go; the work is one step for each member that fits."""
        if count < 1:
            raise ProtocolError(f"{publisher!r} publishes {count} messages")
        sends: list[Send[M]] = []
        losses: list[Loss[M]] = []
        matched = 0
        teams: dict[_Team[M], list[_Seat[M]]] = {}
        for seat in self._matchers.find(topic):
            if seat.team is not None:
                teams.setdefault(seat.team, []).append(seat)
                continue
            matched += 1
            taken = min(seat.credit, count)
            if taken:
                seat.credit -= taken
                sends.append(Send(seat.member, 0, taken))
            if taken < count:
                seat.lost += count - taken
                losses.append(Loss((seat.member,), None, count - taken))
        for team, seats in teams.items():
            matched += 1
            first = 0
            for seat, taken in self._share(seats, count):
                sends.append(Send(seat.member, first, first + taken))
                first += taken
            if first < count:
                team.lost += count - first
                told = tuple(seat.member for seat in seats)
                losses.append(Loss(told, team.name, count - first))
        return Routing(publisher, count, matched, tuple(sends), tuple(losses))

    def _share(self, seats: Sequence[_Seat[M]], count: int) -> list[tuple[_Seat[M], int]]:
        """How many of these messages each takes, as if they had come one by one; most free credit first."""
        free = [seat for seat in seats if seat.credit]
        count = min(count, sum(seat.credit for seat in free))
        if not count:
            return []
        if count == 1:
            best = min(free, key=_most_free)
            best.credit -= 1
            best.served = self._turns
            self._turns += 1
            return [(best, 1)]
        free.sort(key=_most_free)
        level, over, takers = _level([seat.credit for seat in free], count)
        del free[takers:]
        # One by one, a round brings all who have more than some level down to it. Who joins in a round comes first in
        # it, as nobody else was served that long ago; so the last round goes from the least credit up.
        last_round = sorted(free, key=_least_free)
        shares = {seat: seat.credit - level for seat in free}
        for seat in last_round[:over]:
            shares[seat] += 1
        for seat in (*last_round[over:], *last_round[:over]):
            if shares[seat]:
                seat.credit -= shares[seat]
                seat.served = self._turns
                self._turns += 1
        return [(seat, taken) for seat, taken in shares.items() if taken]

    def _seat(self, member: M) -> _Seat[M]:
        seat = self._seats.get(member)
        if seat is None:
            raise NotMemberError(f"{member!r} does not listen to this stream: subscribe first")
        return seat

    def validate(self) -> None:
        """The tables agree with each other."""
        self._matchers.validate()
        assert len(self._matchers) == len(self._seats)
        turns = [seat.served for seat in self._seats.values()]
        assert len(set(turns)) == len(turns), "two members have one turn"
        assert all(turn < self._turns for turn in turns)
        assert all(seat.credit >= 0 for seat in self._seats.values()), "more sent than granted"
        in_teams = {m: s for team in self._teams.values() for m, s in team.seats.items()}
        assert in_teams == {m: s for m, s in self._seats.items() if s.team is not None}
        for name, team in self._teams.items():
            assert team.name == name
            assert team.seats, "a group without members"
            assert all(seat.team is team for seat in team.seats.values())


def _most_free(seat: _Seat[M]) -> tuple[int, int]:
    return -seat.credit, seat.served


def _least_free(seat: _Seat[M]) -> tuple[int, int]:
    return seat.credit, seat.served


def _level(credits: Sequence[int], count: int) -> tuple[int, int, int]:
    """To which level the highest come down when `count` is taken, each time one from the highest.

    `credits` are positive and sorted, highest first, and `count` is not more than their sum. The answer is the
    level, how many of those on it give one more, and how many there are on it.

    >>> _level([10, 7], 5)
    (6, 0, 2)
    >>> _level([10, 7, 1], 6)
    (6, 1, 2)
    """
    takers, above = 1, 0  # what those have above the last of them
    for one in credits[1:]:
        more = takers * (credits[takers - 1] - one)
        if above + more > count:
            break
        above += more
        takers += 1
    rounds, over = divmod(count - above, takers)
    return credits[takers - 1] - rounds, over, takers


class Responses(Generic[P]):
    """The response streams of a node.

    >>> responses = Responses[str]()
    >>> responses.open("r-1", "ann", deadline=100)
    >>> responses.open("r-2", "bob", deadline=50)
    >>> responses.answer("r-1")
    'ann'
    >>> responses.answer("r-1")
    Traceback (most recent call last):
    railgun.broker.protocol.exchange.RsGoneError: no response is awaited as 'r-1': answered, timed out, ...
    >>> responses.deadline()
    50
    >>> responses.expired(now=50)
    [('r-2', 'bob')]
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[P, int, int]] = {}  # for whom, until when, which one it is
        self._of: dict[P, dict[str, None]] = {}
        self._deadlines: list[tuple[int, int, str]] = []  # a heap; of what has ended, too
        self._next = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def whose(self, name: str) -> P | None:
        """Who awaits it, if anybody does."""
        return self._open[name][0] if name in self._open else None

    def open(self, name: str, publisher: P, deadline: int) -> None:
        """A response is awaited under this name."""
        if name in self._open:
            raise RsExistsError(
                f"a response is awaited as {name!r} already: use a name of your own"
            )
        self._open[name] = publisher, deadline, self._next
        self._of.setdefault(publisher, {})[name] = None
        heappush(self._deadlines, (deadline, self._next, name))
        self._next += 1

    def answer(self, name: str) -> P:
        """The first message under this name: to whom it goes."""
        return self._remove(name)

    def close(self, name: str) -> P:
        """Nobody can answer: to whom that is told."""
        return self._remove(name)

    def gone(self, publisher: P) -> tuple[str, ...]:
        """The requester went away, and so do all it awaited."""
        names = tuple(self._of.get(publisher, ()))
        for name in names:
            self._remove(name)
        return names

    def expired(self, now: int) -> list[tuple[str, P]]:
        """Those whose time is over are removed, and it is for the node to tell; first the earliest."""
        found = []
        while (deadline := self.deadline()) is not None and deadline <= now:
            name = self._deadlines[0][2]
            found.append((name, self._remove(name)))
        return found

    def deadline(self) -> int | None:
        """When `expired` has something to tell."""
        while self._deadlines and not self._awaited(*self._deadlines[0]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _awaited(self, deadline: int, number: int, name: str) -> bool:
        """Whether this deadline is of something open: the name may be in use for another one by now."""
        return name in self._open and self._open[name][2] == number

    def _remove(self, name: str) -> P:
        if name not in self._open:
            raise RsGoneError(
                f"no response is awaited as {name!r}: answered, timed out, or its requester left"
            )
        publisher, _, _ = self._open.pop(name)
        names = self._of[publisher]
        del names[name]
        if not names:
            del self._of[publisher]
        if len(self._deadlines) > 2 * len(self._open) + _SPARE:
            self._deadlines = [one for one in self._deadlines if self._awaited(*one)]
            heapify(self._deadlines)
        return publisher

    def validate(self) -> None:
        """The tables agree with each other."""
        assert {(name, p) for p, names in self._of.items() for name in names} == {
            (name, publisher) for name, (publisher, _, _) in self._open.items()
        }
        assert all(self._of.values()), "a requester that awaits nothing"
        awaited = [one for one in self._deadlines if self._awaited(*one)]
        assert sorted(awaited) == sorted((d, n, name) for name, (_, d, n) in self._open.items())
        assert len(self._deadlines) <= 2 * len(self._open) + _SPARE + 1, "deadlines pile up"
