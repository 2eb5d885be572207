"""What nodes know of each other's listeners: rule by rule, and histories by chance over connections that get lost."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railgun.broker.protocol.exchange import Exchange
from railgun.broker.protocol.interest import Neighbour, News, ReceivedInterest, Remote, SentInterest
from railgun.broker.protocol.response_names import Names, keeper_of

# --- What is known of others ----------------------------------------------------------------------


def known(**streams: Exchange[Any, Any]) -> ReceivedInterest:
    return ReceivedInterest("b", streams.get)


def told(
    known: ReceivedInterest, *news: News, gone: tuple[int, ...] = (), whole: bool = False
) -> None:
    known.tell(news, gone, whole, more=False)
    known.validate()


def test_a_listener_of_another_node_is_a_member_like_others() -> None:
    s = Exchange[Any, str]()
    s.subscribe("ann", group="g")
    s.grant("ann", 2)
    told(known(s=s), News(1, "s", "a.#", "g", 5), News(2, "s", "a", None, 1))
    routing = s.publish("p", "a", count=4)
    assert routing.matched == 2
    sizes = {str(send.member): send.end - send.first for send in routing.sends}
    assert sizes == {"Remote('b', 1)": 3, "Remote('b', 2)": 1, "ann": 1}
    assert s.publish("p", "b").sends[0].member == "ann"


def test_one_whose_stream_is_not_known_yet_is_kept_until_it_appears() -> None:
    streams: dict[str, Exchange[Any, str]] = {}
    there = ReceivedInterest("b", streams.get)
    told(there, News(1, "s", "#", None, 5))
    streams["s"] = s = Exchange[Any, str]()
    there.appeared("s", s)
    there.appeared("s", s)
    assert s.publish("p").sent == 1
    there.vanished("s")
    assert len(s) == 0
    again = Exchange[Any, str]()
    there.appeared("s", again)
    assert again.publish("p").sent == 1
    told(there, gone=(1, 99))
    assert (len(again), len(there)) == (0, 0)


def test_all_anew_drops_who_is_not_named_and_forgets_nothing_of_the_others() -> None:
    s = Exchange[Any, str]()
    there = known(s=s)
    told(there, *(News(number, "s", "#", None, 5) for number in (1, 2, 3)))
    one = there.get(1)
    assert one is not None
    one.sent = 2
    there.tell([News(1, "s", "#", None, 6)], (), whole=True, more=True)
    assert len(there) == 3  # the rest may be named in what comes next
    there.tell([News(3, "s", "#", None, 5), News(4, "s", "#", None, 5)], (), False, more=False)
    there.validate()
    assert there.get(1) is one
    assert one.credit == 4
    assert [there.get(number) is not None for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_nobody_gets_anything_while_too_much_waits() -> None:
    s = Exchange[Any, str]()
    there = known(s=s)
    told(there, News(1, "s", "#", None, 5))
    there.hold()
    told(there, News(1, "s", "#", None, 9), News(2, "s", "#", None, 9))
    assert s.publish("p").sends == ()
    there.free()
    there.validate()
    assert s.publish("p").sent == 2


def test_a_matcher_that_cannot_be_gets_nothing_and_harms_nobody() -> None:
    s = Exchange[Any, str]()
    there = known(s=s)
    told(there, News(1, "s", "a..b", None, 5), News(2, "s", "#", None, 5))
    assert s.publish("p").sent == 1
    there.tell((), (1,), whole=False, more=False)
    assert len(there) == len(s) == 1


# --- What others are told -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("believed", "credit", "worth"),
    [
        *((0, 0, False), (0, 1, True), (1, 0, True), (1, 1, False), (3, 4, False)),
        *((100, 199, False), (100, 200, True), (100, 51, False), (100, 50, True), (1, 2, True)),
    ],
)
def test_news_are_told_when_they_are_worth_it(believed: int, credit: int, worth: bool) -> None:
    other = SentInterest()
    assert other.news(1, believed) == believed
    assert other.news(1, credit) == (credit if worth else None)
    assert other.news(1, credit, always=True) == credit


def test_a_client_that_grants_half_its_window_is_told_of_in_time() -> None:
    other, window = SentInterest(), 1000
    other.news(1, window)
    for taken in range(window // 2, window):  # so many came until it granted half of them
        other.clear()
        other.news(1, window)
        other.took(1, taken)
        assert other.news(1, window - taken + window // 2) == window + window // 2


def test_interest_of_another_time_is_passed_over() -> None:
    s = Exchange[Any, str]()
    b = Neighbour("b", {"s": s}.get)
    news = [News(1, "s", "#", None, 5)]
    assert b.hear(line=7, seen=0, news=news, whole=True)  # there is no connection to it
    assert len(s) == 0
    b.up(3)
    assert not b.hear(line=7, seen=0, news=news, whole=True)  # it had not heard of it
    assert len(s) == 0
    assert not b.hear(line=7, seen=3, news=news, whole=True)
    assert len(s) == 1
    assert b.hear(line=8, seen=2, news=[], whole=True)  # new, and of another time
    assert len(s) == 1
    b.down()
    assert len(s) == 0


# --- Histories ------------------------------------------------------------------------------------


class Node:
    """Nodes as `events.py` drives them, with listeners of their own, and no clients."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.exchange = Exchange[Any, str]()
        self.mine: dict[int, str | None] = {}
        self.granted: dict[int, int] = {}
        self.came: dict[int, int] = {}
        self.neighbours = {
            other: Neighbour(other, {"s": self.exchange}.get) for other in "abc" if other != name
        }
        self.lost = 0  # by this judge

    def flush(self) -> None:
        for other in self.neighbours.values():
            if other.line:
                self.tell(other, False)

    def tell(self, other: Neighbour, whole: bool) -> None:
        news = []
        for number, group in self.mine.items():
            limit = other.told.news(number, self.exchange.credit(number), always=whole)
            if limit is not None:
                news.append(News(number, "s", "#", group, limit))
        if news or whole:
            self.send(other, (other.line, other.heard, news, (), whole, False))

    def send(self, other: Neighbour, what: Any) -> None:
        self.world.lines[self.name, other.node].append((other.line, what))

    def leave(self, number: int) -> None:
        self.exchange.leave(number)
        del self.mine[number]
        for other in self.neighbours.values():
            if other.told.forget(number) and other.line:
                self.send(other, (other.line, other.heard, (), (number,), False, False))

    def publish(self, count: int) -> None:
        parts: dict[str, list[tuple[int, int]]] = {}
        for send in self.exchange.publish("p", count=count).sends:
            if isinstance(send.member, Remote):
                send.member.sent += send.end - send.first
                parts.setdefault(send.member.node, []).append(
                    (send.member.number, send.end - send.first)
                )
            else:
                self.came[send.member] = self.came.get(send.member, 0) + send.end - send.first
        for node, some in parts.items():
            self.send(self.neighbours[node], some)

    def receive(self, sender: str, line: int, what: Any) -> None:
        other = self.neighbours[sender]
        if isinstance(what, tuple):
            if other.hear(*what) and other.line:
                self.tell(other, True)
            return
        if line != other.heard:
            return
        for number, count in what:
            if number in self.mine:
                other.told.took(number, count)
                taken = self.exchange.take(number, count)
                self.came[number] = self.came.get(number, 0) + taken
                self.lost += count - taken


class World:
    """Three nodes, connections that keep the order and get lost, and what happens by chance."""

    def __init__(self, chance: Random, publishers: str = "abc", shrinking: bool = True) -> None:
        self.chance, self.publishers, self.shrinking = chance, publishers, shrinking
        self.lines: dict[tuple[str, str], deque[tuple[int, Any]]] = {
            (one, other): deque() for one in "abc" for other in "abc" if one != other
        }
        self.nodes = {name: Node(name, self) for name in "abc"}
        self.numbers = 0

    def step(self) -> None:
        chance = self.chance
        node = chance.choice(list(self.nodes.values()))
        other = chance.choice(list(node.neighbours.values()))
        what = chance.random()
        if what < 0.08 and len(node.mine) < 3:
            self.numbers += 1
            group = chance.choice([None, "g", "h"])
            node.mine[self.numbers] = group
            node.exchange.subscribe(self.numbers, group=group)
            node.granted[self.numbers] = 0
            node.flush()
        elif what < 0.11 and node.mine:
            node.leave(chance.choice(list(node.mine)))
        elif what < 0.3 and node.mine:
            number = chance.choice(list(node.mine))
            credit = chance.choice([1, 1, 2, 5, 8])
            node.granted[number] += credit
            node.exchange.grant(number, credit)
            node.flush()
        elif what < 0.45:
            if node.name in self.publishers:
                node.publish(chance.choice([1, 1, 2, 3, 12]))
                node.flush()
        elif what < 0.52:
            self.toggle(node, other)
        else:
            self.pass_on(node.name, other.node)
        self.validate()

    def toggle(self, node: Node, other: Neighbour) -> None:
        if other.line:
            self.lines[node.name, other.node].clear()
            other.down()
        else:
            self.numbers += 1
            other.up(self.numbers)
            node.tell(other, True)

    def pass_on(self, sender: str, to: str) -> None:
        if self.lines[sender, to]:
            node = self.nodes[to]
            node.receive(sender, *self.lines[sender, to].popleft())
            node.flush()

    def validate(self) -> None:
        for node in self.nodes.values():
            node.exchange.validate()
            for other in node.neighbours.values():
                other.known.validate()
            for number, came in node.came.items():
                assert came <= node.granted[number], "more than it was ready for"
            if not self.shrinking:
                assert node.lost == 0, "a single sender sends more than there is room for"

    def settle(self) -> None:
        """All connections are there, and everything has come: everybody knows enough of everybody."""
        for node in self.nodes.values():
            for other in node.neighbours.values():
                if not other.line:
                    self.toggle(node, other)
        for _ in range(1000):
            for sender, to in self.lines:
                self.pass_on(sender, to)
        assert not any(self.lines.values()), "they never stop talking"
        for node in self.nodes.values():
            expected = {(other, number) for other in "abc" if other != node.name
                        for number in self.nodes[other].mine}  # fmt: skip
            found = {
                (m.node, m.number): node.exchange.credit(m)
                for m in node.exchange.members()
                if isinstance(m, Remote)
            }
            assert found.keys() == expected
            for (owner, number), believed in found.items():
                credit = self.nodes[owner].exchange.credit(number)
                assert bool(believed) == bool(credit)
                assert believed <= 2 * credit
                assert credit <= 2 * believed
                assert self.nodes[owner].mine[number] == next(
                    m.group for m in node.exchange.members()
                    if isinstance(m, Remote) and (m.node, m.number) == (owner, number)
                )  # fmt: skip


def play(chance: Random, steps: int, **asked: Any) -> None:
    world = World(chance, **asked)
    for _ in range(steps):
        world.step()
    world.settle()
    world.validate()


def hunt(seeds: int = 250, **asked: Any) -> None:
    for seed in range(seeds):
        play(Random(seed), 120, **asked)


def test_histories_by_chance() -> None:
    hunt()


def test_a_single_sender_never_sends_more_than_there_is_room_for() -> None:
    hunt(publishers="a", shrinking=False)


@settings(deadline=None, max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(0, 100))
def test_histories_that_shrink(chance: Random, steps: int) -> None:
    play(chance, steps)


# --- Mutants --------------------------------------------------------------------------------------


def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Neighbour, line: int, *rest: Any) -> bool:  # all times are one
        new, self.heard = line != self.heard, line
        if self.line:
            self.known.tell(*rest[1:])
        return new

    def absolute(
        self: SentInterest, number: int, count: int
    ) -> None:  # credit, whatever is on its way
        pass

    def stubborn(self: SentInterest) -> None:  # what was told once is known for ever
        pass

    def lazy(self: SentInterest, number: int, credit: int, always: bool = False) -> int | None:
        if number in self._limits and not always:
            return None
        limit = self._limits[number] = self._taken.get(number, 0) + credit
        return limit

    for kind, name, instead in (
        (Neighbour, "hear", forgetful),
        (SentInterest, "took", absolute),
        (SentInterest, "clear", stubborn),
        (SentInterest, "news", lazy),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, instead)
            with pytest.raises(AssertionError):
                hunt(publishers="a", shrinking=False)


# --- Names of responses ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=20), st.sets(st.text(max_size=5), min_size=2, max_size=6))
def test_a_node_that_goes_moves_only_its_own_names(name: str, nodes: set[str]) -> None:
    keeper = keeper_of(name, nodes)
    assert keeper == keeper_of(name, sorted(nodes, reverse=True))
    for gone in nodes - {keeper}:
        assert keeper_of(name, nodes - {gone}) == keeper


def test_names_are_shared_out() -> None:
    kept = [keeper_of(f"r-{n}", ["a", "b", "c"]) for n in range(3000)]
    assert all(800 < kept.count(node) < 1200 for node in "abc")


def test_a_name_is_kept_until_it_is_released_or_its_node_is_gone() -> None:
    names = Names()
    assert names.reserve("r", "a", deadline=100, now=0)
    assert names.reserve("r", "a", deadline=200, now=50)  # who has it gets it again
    assert not names.reserve("r", "b", deadline=900, now=199)
    names.release("r", "b")  # is not b's
    assert names.home("r") == "a"
    names.release("r", "a")
    assert names.reserve("r", "b", deadline=900, now=199)
    names.gone("b")
    assert (names.home("r"), len(names)) == (None, 0)
    assert names.reserve("r", "a", deadline=300, now=200)
    assert names.reserve("r", "b", deadline=900, now=300)  # its time was over
