"""Ephemeral and response streams: rows ES and RS of the design, against models that go message by message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verification.rewriting import rewritten

from railgun.broker.protocol import exchange as module
from railgun.broker.protocol.exchange import (
    AlreadyMemberError,
    Exchange,
    Loss,
    NoAcksError,
    NotMemberError,
    Responses,
    Routing,
    RsExistsError,
    RsGoneError,
    Send,
    _Seat,
)
from railgun.broker.protocol.topics import MatcherError, TopicError
from railgun.errors import ProtocolError

# --- Ephemeral streams, rule by rule --------------------------------------------------------------


def listening(credit: int, *members: str, group: str | None = None) -> Exchange[str, str]:
    exchange = Exchange[str, str]()
    for member in members:
        exchange.subscribe(member, group=group)
        exchange.grant(member, credit)
    return exchange


def test_es_no_match_is_dropped_and_the_receipt_says_so() -> None:
    exchange = Exchange[str, str]()
    exchange.subscribe("ann", "a.*")
    exchange.grant("ann", 5)
    assert exchange.publish("p", "b") == Routing("p", 1, 0)
    assert exchange.publish("p") == Routing("p", 1, 0)
    assert exchange.lost("ann") == 0


def test_es_once_to_each_consumer_and_once_to_each_group() -> None:
    exchange = listening(10, "ann", "bob")
    for member in ("g1", "g2", "g3"):
        exchange.subscribe(member, "a.#", "workers")
        exchange.grant(member, 10)
    routing = exchange.publish("p", "a.b")
    assert routing.matched == 3
    assert routing.sends == (Send("ann", 0, 1), Send("bob", 0, 1), Send("g1", 0, 1))
    assert routing.sent == 3
    assert exchange.publish("p", "c").matched == 2


def test_es_members_of_a_group_may_have_different_matchers() -> None:
    exchange = Exchange[str, str]()
    exchange.subscribe("x", "a.#", "g")
    exchange.subscribe("y", "b.#", "g")
    exchange.grant("x", 100)
    exchange.grant("y", 1)
    assert exchange.publish("p", "b").sends == (Send("y", 0, 1),)
    # The other one has credit, but does not want it.
    assert exchange.publish("p", "b").losses == (Loss(("y",), "g", 1),)


def test_es_a_group_is_balanced_by_free_credit() -> None:
    exchange = Exchange[str, str]()
    for member, credit in (("x", 2), ("y", 9), ("z", 5)):
        exchange.subscribe(member, group="g")
        exchange.grant(member, credit)
    assert exchange.publish("p", count=8).sends == (Send("y", 0, 6), Send("z", 6, 8))
    assert [exchange.credit(m) for m in "xyz"] == [2, 3, 3]


def test_es_equals_take_turns() -> None:
    exchange = listening(6, "x", "y", "z", group="g")
    served = [exchange.publish("p").sends[0].member for _ in range(9)]
    assert served == ["x", "y", "z"] * 3


def test_es_a_member_without_credit_is_not_asked() -> None:
    exchange = listening(3, "x", "y", group="g")
    exchange.subscribe("stuck", group="g")
    routing = exchange.publish("p", count=6)
    assert routing.losses == ()
    assert {send.member for send in routing.sends} == {"x", "y"}


def test_es_a_slow_consumer_loses_the_newest_with_a_counter_and_a_notice() -> None:
    exchange = listening(3, "slow")
    exchange.subscribe("fast")
    exchange.grant("fast", 100)
    routing = exchange.publish("p", count=10)
    assert routing.sends == (Send("slow", 0, 3), Send("fast", 0, 10))
    assert routing.losses == (Loss(("slow",), None, 7),)
    assert routing.matched == 2  # it matched, though it lost
    assert exchange.publish("p").losses == (Loss(("slow",), None, 1),)
    assert (exchange.lost("slow"), exchange.lost("fast")) == (8, 0)
    exchange.grant("slow", 1)
    assert exchange.publish("p").losses == ()


def test_es_a_group_loses_only_what_none_of_it_can_take() -> None:
    exchange = listening(2, "x", "y", group="g")
    routing = exchange.publish("p", count=5)
    assert routing.sends == (Send("x", 0, 2), Send("y", 2, 4))
    assert routing.losses == (Loss(("x", "y"), "g", 1),)
    assert (exchange.lost("x"), exchange.lost("y")) == (1, 1)  # of their group


def test_es_who_left_gets_nothing_and_a_group_ends_with_its_last_member() -> None:
    exchange = listening(1, "x", "y", group="g")
    exchange.publish("p", count=3)
    exchange.leave("x")
    assert exchange.members("g") == ("y",)
    exchange.leave("y")
    assert exchange.members() == exchange.members("g") == ()
    assert exchange.publish("p").matched == 0
    exchange.subscribe("x", group="g")
    assert exchange.lost("x") == 0
    exchange.validate()


def test_es_ack_and_nack_are_errors() -> None:
    with pytest.raises(NoAcksError) as caught:
        listening(1, "ann").ack("ann")
    assert caught.value.code == "NO_ACKS"


def test_es_what_is_wrong_is_refused_and_changes_nothing() -> None:
    exchange = listening(1, "ann")
    with pytest.raises(AlreadyMemberError):
        exchange.subscribe("ann", "a")
    with pytest.raises(MatcherError):
        exchange.subscribe("bob", "a..b", "g")
    with pytest.raises(TopicError):
        exchange.publish("p", "a.*")
    for wrong in (exchange.leave, exchange.credit, exchange.lost, lambda m: exchange.grant(m, 1)):
        with pytest.raises(NotMemberError):
            wrong("bob")
    with pytest.raises(ProtocolError):
        exchange.grant("ann", -1)
    with pytest.raises(ProtocolError):
        exchange.publish("p", count=0)
    exchange.validate()
    assert (exchange.members(), exchange.members("g")) == (("ann",), ())


def test_es_the_work_does_not_depend_on_the_number_of_messages() -> None:
    many = 10**15  # one step for each of them would never end
    exchange = listening(many, "x", "y", "z", group="g")
    exchange.subscribe("ann")
    exchange.grant("ann", many)
    routing = exchange.publish("p", count=many)
    assert routing.sent == 2 * many
    shares = [send.end - send.first for send in routing.sends[1:]]
    assert max(shares) - min(shares) <= 1


# --- The model of an exchange ---------------------------------------------------------------------

FITS = {  # matcher → topics, by hand
    "#": {"", "a", "a.b", "b", "b.c.d"},
    "": {""},
    "a": {"a"},
    "*": {"a", "b"},
    "a.#": {"a", "a.b"},
    "#.b": {"a.b", "b"},
    "#.c.#": {"b.c.d"},
}
TOPICS = ["", "a", "a.b", "b", "b.c.d"]


@dataclass
class Listener:
    name: int
    matcher: str
    group: str | None
    credit: int = 0


@dataclass
class Model:
    """One message after the other, to one entity after the other."""

    listeners: list[Listener] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)  # who was served longest ago is first
    lost: dict[int | str, int] = field(default_factory=dict)

    def publish(
        self, topic: str, count: int
    ) -> tuple[int, dict[int, list[int]], dict[int | str, int]]:
        fitting = [one for one in self.listeners if topic in FITS[one.matcher]]
        entities: dict[int | str, list[Listener]] = {}
        for one in fitting:
            entities.setdefault(one.name if one.group is None else one.group, []).append(one)
        received: dict[int, list[int]] = {}
        lost: dict[int | str, int] = {}
        for message in range(count):
            for entity, members in entities.items():
                ready = [one for one in members if one.credit]
                if not ready:
                    lost[entity] = lost.get(entity, 0) + 1
                    self.lost[entity] = self.lost.get(entity, 0) + 1
                    continue
                most = max(one.credit for one in ready)
                best = min(
                    (one for one in ready if one.credit == most),
                    key=lambda one: self.queue.index(one.name),
                )
                best.credit -= 1
                self.queue.remove(best.name)
                self.queue.append(best.name)
                received.setdefault(best.name, []).append(message)
        return len(entities), received, lost

    def leave(self, name: int) -> None:
        left = next(one for one in self.listeners if one.name == name)
        self.listeners.remove(left)
        self.queue.remove(name)
        if left.group is None or all(one.group != left.group for one in self.listeners):
            self.lost.pop(name if left.group is None else left.group, None)


class Play:
    """A history by chance, of the exchange and the model side by side."""

    def __init__(self, chance: Random, make: type[Exchange[int, str]]) -> None:
        self.chance = chance
        self.exchange = make()
        self.model = Model()
        self.published: dict[str, int] = {}
        self.seen: dict[tuple[str, int], int] = {}  # the last one of a publisher at a subscriber

    def step(self) -> None:
        names = [one.name for one in self.model.listeners]
        what = self.chance.random()
        if what < 0.2 and len(names) < 9:
            name = self.chance.choice([n for n in range(12) if n not in names])
            group = self.chance.choice([None, "g", "g", "h"])
            matcher = self.chance.choice(["#", "#", *FITS])
            self.exchange.subscribe(name, matcher, group)
            self.model.listeners.append(Listener(name, matcher, group))
            self.model.queue.append(name)
            self.seen = {key: last for key, last in self.seen.items() if key[1] != name}
        elif what < 0.27 and names:
            name = self.chance.choice(names)
            self.exchange.leave(name)
            self.model.leave(name)
        elif what < 0.6 and names:
            one = self.chance.choice(self.model.listeners)
            credit = self.chance.choice([0, 1, 1, 2, 3, 5, 8])
            self.exchange.grant(one.name, credit)
            one.credit += credit
        else:
            self.publish(self.chance.choice(TOPICS), self.chance.choice([1, 1, 2, 3, 5, 12]))
        self.compare()

    def publish(self, topic: str, count: int) -> None:
        publisher = self.chance.choice(["p", "q"])
        routing = self.exchange.publish(publisher, topic, count)
        matched, received, lost = self.model.publish(topic, count)
        assert (routing.publisher, routing.count, routing.matched) == (publisher, count, matched)
        sizes = {send.member: send.end - send.first for send in routing.sends}
        assert len(sizes) == len(routing.sends), "one range for each"
        assert sizes == {name: len(messages) for name, messages in received.items()}
        told = {loss.group or loss.members[0]: loss.count for loss in routing.losses}
        assert told == lost
        groups = {one.name: one.group for one in self.model.listeners}
        spans: dict[int | str, list[int]] = {}
        for send in routing.sends:
            assert send.first < send.end
            spans.setdefault(groups[send.member] or send.member, []).extend(
                range(send.first, send.end)
            )
        for entity, span in spans.items():  # each once, the newest lost
            assert span == list(range(count - lost.get(entity, 0)))
        for loss in routing.losses:
            for member in loss.members:
                assert groups[member] == loss.group
        self.in_order(publisher, routing)

    def in_order(self, publisher: str, routing: Routing[int, str]) -> None:
        base = self.published.get(publisher, 0)
        self.published[publisher] = base + routing.count
        for send in routing.sends:
            assert base + send.first > self.seen.get((publisher, send.member), -1)
            self.seen[publisher, send.member] = base + send.end - 1

    def compare(self) -> None:
        self.exchange.validate()
        assert self.exchange.members() == tuple(one.name for one in self.model.listeners)
        for one in self.model.listeners:
            assert self.exchange.credit(one.name) == one.credit
            entity = one.name if one.group is None else one.group
            assert self.exchange.lost(one.name) == self.model.lost.get(entity, 0)
        for group in {one.group for one in self.model.listeners if one.group is not None}:
            members = self.exchange.members(group)
            assert turns(self.exchange, group) == [n for n in self.model.queue if n in members]


def turns(exchange: Exchange[int, str], group: str) -> list[int]:
    """The members of a group, first the one that was served the longest ago."""
    assert exchange.members(group), f"nobody listens in {group!r}"
    seats = exchange._teams[group].seats.values()
    return [seat.member for seat in sorted(seats, key=lambda seat: seat.served)]


def hunt(make: type[Exchange[int, str]], seeds: int = 150) -> None:
    for seed in range(seeds):
        play = Play(Random(seed), make)
        for _ in range(60):
            play.step()


def test_es_histories_by_chance() -> None:
    hunt(Exchange, 300)


@settings(deadline=None, max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(0, 60))
def test_es_histories_that_shrink(chance: Random, steps: int) -> None:
    play = Play(chance, Exchange)
    for _ in range(steps):
        play.step()


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=6), st.lists(st.integers(1, 20), max_size=6)
)
def test_es_a_batch_is_the_same_as_its_messages_one_by_one(
    credits: list[int], batches: list[int]
) -> None:
    at_once, singly = Exchange[int, str](), Exchange[int, str]()
    for exchange in (at_once, singly):
        for member, credit in enumerate(credits):
            exchange.subscribe(member, group="g")
            exchange.grant(member, credit)
    for count in batches:
        at_once.publish("p", count=count)
        for _ in range(count):
            singly.publish("p")
        for exchange in (at_once, singly):
            exchange.grant(0, 2)
        for member in range(len(credits)):
            assert at_once.credit(member) == singly.credit(member)
            assert at_once.lost(member) == singly.lost(member)
        assert turns(at_once, "g") == turns(singly, "g")


# --- Mutants of the exchange ----------------------------------------------------------------------


class Greedy(Exchange[int, str]):
    """The most free takes as much as it can."""

    def _share(self, seats: Sequence[_Seat[int]], count: int) -> list[tuple[_Seat[int], int]]:
        shares = []
        for seat in sorted(seats, key=module._most_free):
            taken = min(seat.credit, count)
            if taken:
                seat.credit -= taken
                count -= taken
                shares.append((seat, taken))
        return shares


class Groupless(Exchange[int, str]):
    """Every member is an entity."""

    def subscribe(self, member: int, matcher: str = "#", group: str | None = None) -> None:
        super().subscribe(member, matcher)


class Oldest(Exchange[int, str]):
    """A slow consumer loses the oldest."""

    def publish(self, publisher: str, topic: str = "", count: int = 1) -> Routing[int, str]:
        routing = super().publish(publisher, topic, count)
        behind = {loss.members[0]: loss.count for loss in routing.losses}
        sends = tuple(
            Send(s.member, s.first + behind.get(s.member, 0), s.end + behind.get(s.member, 0))
            for s in routing.sends
        )
        return Routing(publisher, count, routing.matched, sends, routing.losses)


class Uncounted(Exchange[int, str]):
    """Losses are told and not counted."""

    def lost(self, member: int) -> int:
        return super().lost(member) * 0


class Generous(Exchange[int, str]):
    """Who has just come is ready for one message."""

    def subscribe(self, member: int, matcher: str = "#", group: str | None = None) -> None:
        super().subscribe(member, matcher, group)
        self.grant(member, 1)


@pytest.mark.parametrize("mutant", [Greedy, Groupless, Oldest, Uncounted, Generous])
def test_mutants_of_the_exchange_are_caught(mutant: type[Exchange[int, str]]) -> None:
    with pytest.raises(AssertionError):
        hunt(mutant)


@pytest.mark.parametrize(
    "instead",
    [
        "last_round",  # who began the last round is served last
        "(*last_round[:over], *last_round[over:])",
        "free",
        "(*last_round[over + 1 :], *last_round[: over + 1])",
    ],
)
def test_mutants_of_the_turns_after_a_partial_round_are_caught(
    monkeypatch: pytest.MonkeyPatch, instead: str
) -> None:
    order = "(*last_round[over:], *last_round[:over])"
    monkeypatch.setattr(*rewritten(Exchange, "_share", (order, instead)))
    with pytest.raises(AssertionError):
        hunt(Exchange)


@pytest.mark.parametrize(
    ("rule", "instead"),
    [
        ("_most_free", lambda seat: (-seat.credit, -seat.served)),  # who was served last
        ("_most_free", lambda seat: (seat.credit, seat.served)),  # the least free
        ("_most_free", lambda seat: (0, seat.served)),  # turns, whatever the credit
        ("_least_free", lambda seat: (-seat.credit, seat.served)),
        ("_least_free", lambda seat: (seat.credit, -seat.served)),
    ],
)
def test_mutants_of_the_balance_are_caught(
    monkeypatch: pytest.MonkeyPatch, rule: str, instead: object
) -> None:
    monkeypatch.setattr(module, rule, instead)
    with pytest.raises(AssertionError):
        hunt(Exchange)


# --- Response streams, rule by rule ---------------------------------------------------------------


def test_rs_the_first_message_wins_and_later_ones_find_it_gone() -> None:
    responses = Responses[str]()
    responses.open("r", "ann", 100)
    assert "r" in responses
    assert responses.answer("r") == "ann"
    with pytest.raises(RsGoneError) as caught:
        responses.answer("r")
    assert caught.value.code == "RS_GONE"
    assert responses.expired(1000) == []


def test_rs_a_name_in_use_is_an_error() -> None:
    responses = Responses[str]()
    responses.open("r", "ann", 100)
    with pytest.raises(RsExistsError) as caught:
        responses.open("r", "bob", 50)
    assert caught.value.code == "RS_EXISTS"
    assert responses.deadline() == 100
    assert responses.answer("r") == "ann"


def test_rs_the_server_tells_the_timeout_once() -> None:
    responses = Responses[str]()
    for name, deadline in (("late", 200), ("early", 100), ("middle", 150)):
        responses.open(name, "ann", deadline)
    assert responses.deadline() == 100
    assert responses.expired(99) == []
    assert responses.expired(150) == [("early", "ann"), ("middle", "ann")]
    assert responses.expired(150) == []
    with pytest.raises(RsGoneError):
        responses.answer("early")
    assert responses.deadline() == 200


def test_rs_an_answer_before_the_timeout_is_told_wins_even_if_it_is_late() -> None:
    responses = Responses[str]()
    responses.open("r", "ann", 100)
    assert responses.answer("r") == "ann"
    assert responses.expired(500) == []
    assert responses.deadline() is None


def test_rs_what_a_requester_awaited_ends_with_it() -> None:
    responses = Responses[str]()
    for name, publisher in (("r1", "ann"), ("r2", "bob"), ("r3", "ann")):
        responses.open(name, publisher, 100)
    assert responses.gone("ann") == ("r1", "r3")
    assert responses.gone("ann") == ()
    with pytest.raises(RsGoneError):
        responses.answer("r3")
    assert responses.expired(100) == [("r2", "bob")]


def test_rs_nobody_matches() -> None:
    responses = Responses[str]()
    exchange = Exchange[str, str]()
    responses.open("r", "ann", 100)
    assert exchange.publish("ann", "a").matched == 0
    assert responses.close("r") == "ann"
    assert len(responses) == 0


def test_rs_a_name_used_anew_has_its_own_deadline() -> None:
    responses = Responses[str]()
    responses.open("r", "ann", 100)
    responses.answer("r")
    responses.open("r", "bob", 300)
    assert responses.expired(100) == []
    assert responses.deadline() == 300


def test_rs_deadlines_of_what_has_ended_do_not_pile_up() -> None:
    responses = Responses[int]()
    for number in range(5000):
        responses.open(f"r{number}", number % 3, 10**9 + number)
        responses.answer(f"r{number}")
        assert len(responses._deadlines) < 100
    responses.validate()


# --- The model of response streams ----------------------------------------------------------------


def hunt_responses(make: type[Responses[int]], seeds: int = 100) -> set[str]:
    """Every request has one outcome, the one that a plain list of what is open says."""
    outcomes: set[str] = set()
    for seed in range(seeds):
        chance = Random(seed)
        responses = make()
        waiting: list[tuple[str, int, int]] = []  # name, publisher, deadline
        clock = 1000
        for _ in range(80):
            clock += chance.choice([0, 1, 5, 20, -30])
            name, publisher = f"r{chance.randrange(8)}", chance.randrange(3)
            found = [one for one in waiting if one[0] == name]
            what = chance.choice(["open", "open", "open", "answer", "close", "gone", "expired"])
            if what == "open" and found:
                outcomes.add("exists")
                with pytest.raises(RsExistsError):
                    responses.open(name, publisher, clock + 1)
            elif what == "open":
                deadline = clock + chance.choice([-5, 0, 5, 20, 50])
                responses.open(name, publisher, deadline)
                waiting.append((name, publisher, deadline))
            elif what in ("answer", "close"):
                act = responses.answer if what == "answer" else responses.close
                if found:
                    outcomes.add(what)
                    assert act(name) == found[0][1]
                    waiting.remove(found[0])
                else:
                    outcomes.add("gone before")
                    with pytest.raises(RsGoneError):
                        act(name)
            elif what == "gone":
                outcomes.add(what)
                expected = [one for one in waiting if one[1] == publisher]
                assert responses.gone(publisher) == tuple(one[0] for one in expected)
                waiting = [one for one in waiting if one[1] != publisher]
            else:
                over = sorted((one for one in waiting if one[2] <= clock), key=lambda one: one[2])
                outcomes |= {"expired"} if over else set()
                assert responses.expired(clock) == [one[:2] for one in over]
                waiting = [one for one in waiting if one[2] > clock]
            responses.validate()
            assert responses.deadline() == min((one[2] for one in waiting), default=None)
            assert len(responses) == len(waiting)
    return outcomes


def test_rs_histories_by_chance() -> None:
    everything = {"exists", "answer", "close", "gone before", "gone", "expired"}
    assert hunt_responses(Responses, 300) == everything


class Twice(Responses[int]):
    """An answer does not remove it."""

    def answer(self, name: str) -> int:
        publisher = super().answer(name)
        self.open(name, publisher, 2000)
        return publisher


class Late(Responses[int]):
    """A deadline is over a moment later."""

    def expired(self, now: int) -> list[tuple[str, int]]:
        return super().expired(now - 1)


class Mixed(Responses[int]):
    """A deadline counts for whatever has its name."""

    def _awaited(self, deadline: int, number: int, name: str) -> bool:
        return name in self._open


class Faithful(Responses[int]):
    """What a requester awaited stays when it goes."""

    def gone(self, publisher: int) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize("mutant", [Twice, Late, Mixed, Faithful])
def test_mutants_of_responses_are_caught(mutant: type[Responses[int]]) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        hunt_responses(mutant)
