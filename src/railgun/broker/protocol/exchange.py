"""Routing of messages on ephemeral streams, and the responses that requesters await.

**An ephemeral stream** stores nothing: a message goes to its current listeners. Rules of an `Exchange`:

1. A message goes once to every *entity* with a matcher that matches its topic: a consumer of its own, or a group. The
   receipt says how many entities those are; if there are none, the message is dropped.
2. In a group it goes to one of the members whose matchers match and that have credit: the one with the most, and among
   equals the one that was served the longest ago. A member without credit is skipped: a slow or stuck member costs
   nothing.
3. Credit is how many messages a member is ready to take. A member with too little credit for a publish gets the
   beginning of it and loses the newest messages, which are counted and reported; the publisher is never held up. A
   group loses only what none of its members can take, and that counts for the group.
4. A publish of many messages is one decision, with the same outcome as if they had come one by one: as many for each
   member and the same turns afterwards. Each member of a group gets one range of it, so the messages of a publisher
   reach each subscriber in the order in which they were published, if the driver sends in the order of the results.
5. There is nothing to acknowledge: ack and nack are errors.

**A response stream** is a name under which one message is awaited. Rules of `Responses`:

1. A request opens it, with a deadline; a name that is open cannot be opened again.
2. The first message wins and removes the name; all later ones find it gone. So there is one outcome: an answer, a
   timeout reported by the node, no consumer that could answer, or a requester that went away. An answer that comes
   after the deadline but before the timeout was reported still wins.
3. No consumer can subscribe to it: the requester is its one subscriber, and its responses end with it.

The driver opens the response before it routes the request; if `matched` is 0 it closes the response and answers
NO_CONSUMERS.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar, Final, Generic, NoReturn, TypeVar

from railgun.broker.protocol.topics import ALL, Matchers
from railgun.errors import ProtocolError, RailgunError

M = TypeVar("M", bound=Hashable)  # the driver's key of a member
P = TypeVar("P", bound=Hashable)  # the driver's key of a publisher

_SPARE_DEADLINES: Final = 64  # deadlines of ended responses that are kept before a clean-up pays


class NotMemberError(RailgunError, LookupError):
    """The member does not listen to this stream: it never subscribed, or it left."""

    code: ClassVar[str] = "NOT_MEMBER"


class AlreadyMemberError(RailgunError):
    """The member listens to this stream already; to change its matcher or group, it leaves first."""

    code: ClassVar[str] = "ALREADY_MEMBER"


class NoAcksError(RailgunError):
    """An ack or nack on an ephemeral stream, where a sent message cannot be sent again."""

    code: ClassVar[str] = "NO_ACKS"


class RsExistsError(RailgunError):
    """A response is already awaited under this name."""

    code: ClassVar[str] = "RS_EXISTS"


class RsGoneError(RailgunError, LookupError):
    """No response is awaited under this name: answered, timed out, or its requester left."""

    code: ClassVar[str] = "RS_GONE"


@dataclass(frozen=True, slots=True)
class Send(Generic[M]):
    """Send messages [first, end) of the publish to this member."""

    member: M
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Loss(Generic[M]):
    """This entity loses the newest `count` messages of the publish; report the loss to `members`."""

    members: tuple[M, ...]  # a consumer of its own, or the members of a group whose matchers fit
    group: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Routing(Generic[M, P]):
    """The outcome of a publish; `matched` is for its receipt."""

    publisher: P
    count: int
    matched: int  # entities with a matching matcher
    sends: tuple[Send[M], ...] = ()
    losses: tuple[Loss[M], ...] = ()

    @property
    def sent(self) -> int:
        """Return how many copies of messages are sent in all."""
        return sum(send.end - send.first for send in self.sends)


class _Seat(Generic[M]):
    """A member and its credit. Seats are compared by identity, which makes lookups cheap."""

    __slots__ = ("credit", "lost", "matcher", "member", "served", "team")

    def __init__(self, member: M, matcher: str, team: _Team[M] | None, served: int) -> None:
        self.member = member
        self.matcher = matcher
        self.team = team
        self.credit = 0
        self.served = served  # turn of the last send: the lowest was served the longest ago
        self.lost = 0


class _Team(Generic[M]):
    """A group: its members, and how many messages it has lost."""

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
        """Add a listener, without credit. In a group, its turn comes after those of the present members.

        Raises `AlreadyMemberError` if the member listens already, and `MatcherError` for an invalid matcher.
        """
        if member in self._seats:
            raise AlreadyMemberError(
                f"{member!r} listens to this stream already: let it leave first"
            )
        team = None if group is None else self._teams.get(group) or _Team(group)
        seat = _Seat(member, matcher, team, self._turns)
        self._matchers.add(matcher, seat)  # raises before anything has changed
        self._turns += 1
        self._seats[member] = seat
        if team is not None:
            self._teams[team.name] = team
            team.seats[member] = seat

    def leave(self, member: M) -> None:
        """Remove a listener; messages sent to it and not received are lost."""
        seat = self._seat(member)
        del self._seats[member]
        self._matchers.remove(seat.matcher, seat)
        if seat.team is not None:
            del seat.team.seats[member]
            if not seat.team.seats:
                del self._teams[seat.team.name]

    def grant(self, member: M, n: int) -> None:
        """Add `n` to the credit of a member."""
        if n < 0:
            raise ProtocolError(
                f"{member!r} grants {n} messages: credit is given, never taken back"
            )
        self._seat(member).credit += n

    def credit(self, member: M) -> int:
        """Return for how many messages a member is ready."""
        return self._seat(member).credit

    def set_credit(self, member: M, credit: int) -> None:
        """Set the credit of a member, by the word of the node that owns it."""
        self._seat(member).credit = credit

    def take(self, member: M, count: int) -> int:
        """Use the credit of a member for `count` messages that another node sent it. Return for how many it has credit.

        The rest is lost to the member, or to its group.
        """
        seat = self._seat(member)
        taken = min(seat.credit, count)
        if taken:
            seat.credit -= taken
            seat.served = self._turns
            self._turns += 1
        (seat if seat.team is None else seat.team).lost += count - taken
        return taken

    def lost(self, member: M) -> int:
        """Return how many messages a member has lost, or its group since the group has had members."""
        seat = self._seat(member)
        return seat.lost if seat.team is None else seat.team.lost

    def members(self, group: str | None = None) -> tuple[M, ...]:
        """Return the listeners, or those of one group, in the order in which they subscribed."""
        if group is None:
            return tuple(self._seats)
        return tuple(self._teams[group].seats) if group in self._teams else ()

    def ack(self, member: M) -> NoReturn:
        """Refuse an ack or nack: a message of an ephemeral stream cannot be sent again."""
        raise NoAcksError(f"{member!r} acks or nacks on an ephemeral stream: leave it out")

    def publish(self, publisher: P, topic: str = "", count: int = 1) -> Routing[M, P]:
        """Route `count` messages of one topic. The work is one step for each matching member."""
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
                members = tuple(seat.member for seat in seats)
                losses.append(Loss(members, team.name, count - first))
        return Routing(publisher, count, matched, tuple(sends), tuple(losses))

    def _share(self, seats: Sequence[_Seat[M]], count: int) -> list[tuple[_Seat[M], int]]:
        """Return how many of `count` messages each member takes, as if they came one by one; most free credit first."""
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
        # One by one, a round brings all members above a level down to it. A member that takes part for the first time
        # comes first in its round, as no other was served that long ago; so the last round goes from the least credit
        # up.
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
        """Assert that the tables agree with each other."""
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
    """Return the level to which the highest credits fall when `count` is taken, each time one from the highest.

    `credits` are positive and sorted, highest first, and `count` is not more than their sum. Return the level, how many
    of those on it give one more, and how many there are on it.

    >>> _level([10, 7], 5)
    (6, 0, 2)
    >>> _level([10, 7, 1], 6)
    (6, 1, 2)
    """
    takers, above = 1, 0  # `above`: credit of the takers above that of the last one
    for credit in credits[1:]:
        more = takers * (credits[takers - 1] - credit)
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
        self._open: dict[str, tuple[P, int, int]] = {}  # requester, deadline, number of the request
        self._of: dict[P, dict[str, None]] = {}
        self._deadlines: list[tuple[int, int, str]] = []  # a heap; includes ended responses
        self._next = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def whose(self, name: str) -> P | None:
        """Return the requester that awaits this response, or None."""
        return self._open[name][0] if name in self._open else None

    def open(self, name: str, publisher: P, deadline: int) -> None:
        """Await a response under a name until `deadline`. Raises `RsExistsError` if the name is open."""
        if name in self._open:
            raise RsExistsError(
                f"a response is awaited as {name!r} already: use a name of your own"
            )
        self._open[name] = publisher, deadline, self._next
        self._of.setdefault(publisher, {})[name] = None
        heappush(self._deadlines, (deadline, self._next, name))
        self._next += 1

    def answer(self, name: str) -> P:
        """Take the first answer to a response; return its requester. Raises `RsGoneError`."""
        return self._remove(name)

    def close(self, name: str) -> P:
        """Close a response that no consumer can answer; return its requester. Raises `RsGoneError`."""
        return self._remove(name)

    def gone(self, publisher: P) -> tuple[str, ...]:
        """Close all responses of a requester that went away; return their names."""
        names = tuple(self._of.get(publisher, ()))
        for name in names:
            self._remove(name)
        return names

    def expired(self, now: int) -> list[tuple[str, P]]:
        """Close the responses whose deadline is over; return them, the earliest first, for the node to report."""
        closed = []
        while (deadline := self.deadline()) is not None and deadline <= now:
            name = self._deadlines[0][2]
            closed.append((name, self._remove(name)))
        return closed

    def deadline(self) -> int | None:
        """Return when `expired` is due next, or None."""
        while self._deadlines and not self._awaited(*self._deadlines[0]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _awaited(self, deadline: int, number: int, name: str) -> bool:
        """Return whether a deadline belongs to an open response: its name may have been used again since."""
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
        if len(self._deadlines) > 2 * len(self._open) + _SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if self._awaited(*entry)]
            heapify(self._deadlines)
        return publisher

    def validate(self) -> None:
        """Assert that the tables agree with each other."""
        assert {(name, p) for p, names in self._of.items() for name in names} == {
            (name, publisher) for name, (publisher, _, _) in self._open.items()
        }
        assert all(self._of.values()), "a requester that awaits nothing"
        awaited = [entry for entry in self._deadlines if self._awaited(*entry)]
        assert sorted(awaited) == sorted((d, n, name) for name, (_, d, n) in self._open.items())
        assert len(self._deadlines) <= 2 * len(self._open) + _SPARE_DEADLINES + 1, (
            "deadlines pile up"
        )
