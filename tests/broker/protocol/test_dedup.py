"""The IDs of a stream: rows PS-2 and PS-9 of the design, against a model that searches the whole log every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railgun.broker.protocol.dedup import (
    FRESH,
    FULL,
    Duplicate,
    Id,
    IdBox,
    Repeat,
    Ticket,
    Twin,
    Verdict,
)
from railgun.errors import ProtocolError

BOX = 100


# --- Rules, one by one ----------------------------------------------------------------------------


def stored(box: IdBox, ids: Sequence[Id], base: int, time: int) -> tuple[Ticket, ...]:
    ticket = 1000 + base
    assert box.check(ids, time) == [FRESH] * len(ids)
    assert box.begin(ids, ticket) == ()
    return box.accepted(ticket, base, time)


def test_ps_2_a_publish_sent_again_is_stored_once() -> None:
    box = IdBox(BOX, 10)
    assert box.check([b"a"], 0) == [FRESH]
    assert box.begin([b"a"], 1) == ()
    # The connection is cut, the client comes again, and the first one is still being written.
    assert box.check([b"a"], 1) == [Twin(1)]
    assert box.begin([b"a"], 2) == (1,)
    assert box.accepted(1, 7, 2) == (2,)
    assert box.check([b"a"], 2) == [Duplicate(7)]


def test_ps_9_the_box_starts_at_first_acceptance_and_is_not_prolonged() -> None:
    box = IdBox(BOX, 10)
    stored(box, [b"a"], 0, 50)
    for now in (50, 100, 149):
        assert box.check([b"a"], now) == [Duplicate(0)]
    assert box.check([b"a"], 150) == [FRESH]
    assert Duplicate(0).code == "DUPLICATE_ID"


def test_ps_9_the_original_offset_is_told_for_every_message_of_a_batch() -> None:
    box = IdBox(BOX, 10)
    stored(box, [b"a", None, b"b", b"", b"c"], 40, 0)
    stored(box, [b"d"], 50, 1)
    found = box.check([b"c", b"b", b"a", None, b"d", b"x"], 2)
    assert found == [Duplicate(44), Duplicate(42), Duplicate(40), FRESH, Duplicate(50), FRESH]


def test_ps_9_after_its_box_an_id_is_stored_anew_and_has_a_box_again() -> None:
    box = IdBox(BOX, 10)
    stored(box, [b"a"], 0, 0)
    stored(box, [b"a"], 5, 100)
    assert box.check([b"a"], 199) == [Duplicate(5)]
    assert box.check([b"a"], 200) == [FRESH]
    box.validate()


def test_ps_9_twins_wait_and_the_first_of_them_is_fresh_if_it_fails() -> None:
    box = IdBox(BOX, 10)
    box.check([b"a"], 0)
    box.begin([b"a"], 1)
    for ticket in (2, 3):
        assert box.check([b"a"], 0) == [Twin(1)]
        assert box.begin([b"a"], ticket) == (1,)
    assert box.failed(1) == (2, 3)
    assert box.check([b"a"], 1) == [FRESH]
    assert box.begin([b"a"], 2) == ()
    assert box.check([b"a"], 1) == [Twin(2)]
    assert box.begin([b"a"], 3) == (2,)
    assert box.accepted(2, 0, 1) == (3,)
    assert box.check([b"a"], 1) == [Duplicate(0)]


def test_ps_9_who_waits_for_two_waits_for_both() -> None:
    box = IdBox(BOX, 10)
    for ticket, one in ((1, b"a"), (2, b"b")):
        box.check([one], 0)
        box.begin([one], ticket)
    assert box.check([b"b", b"x", b"a"], 0) == [Twin(2), FRESH, Twin(1)]
    assert box.begin([b"b", b"x", b"a"], 3) == (2, 1)
    assert box.check([b"x"], 0) == [FRESH]  # who waits holds nothing
    assert box.accepted(1, 0, 0) == ()
    assert box.failed(2) == (3,)


def test_ps_9_one_who_no_longer_waits_is_not_woken() -> None:
    box = IdBox(BOX, 10)
    box.check([b"a"], 0)
    box.begin([b"a"], 1)
    box.begin([b"a"], 2)
    box.begin([b"a"], 3)
    box.withdraw(2)
    box.validate()
    assert box.failed(1) == (3,)


def test_ps_9_an_id_twice_in_one_publish_is_a_repeat() -> None:
    box = IdBox(BOX, 2)
    assert box.check([b"a", b"b", b"a"], 0) == [FRESH, FRESH, Repeat(0)]
    assert box.check([b"a", b"b", b"c", b"c", b"b"], 0) == [FRESH, FRESH, FULL, FULL, Repeat(1)]


def test_ps_9_past_its_most_a_pool_is_full_and_forgets_nothing() -> None:
    box = IdBox(BOX, 3)
    stored(box, [b"a", None, b"b"], 0, 0)
    assert box.check([b"c", b"d", None, b"a"], 10) == [FRESH, FULL, FRESH, Duplicate(0)]
    assert FULL.code == "ID_POOL_FULL"
    assert box.begin([b"c"], 1) == ()
    assert box.check([b"d"], 10) == [FULL]  # what is being written counts
    assert box.next_expiry(10) == 100
    box.failed(1)
    assert box.check([b"d"], 10) == [FRESH]
    box.check([b"c"], 10)
    box.begin([b"c"], 2)
    box.accepted(2, 3, 10)
    assert box.check([b"d", b"a", b"b", b"c"], 99)[1:] == [Duplicate(0), Duplicate(2), Duplicate(3)]
    assert box.check([b"d"], 99) == [FULL]
    assert box.check([b"d", b"e", b"f"], 100) == [FRESH, FRESH, FULL]


def test_ps_9_a_clock_that_jumps_ahead_and_returns_makes_nothing_forgotten() -> None:
    box = IdBox(BOX, 10)
    stored(box, [b"a"], 0, 1000)
    assert box.check([b"a"], 1_000_000) == [FRESH]
    assert box.check([b"a"], 1010) == [Duplicate(0)]
    assert box.check([b"a"], -50) == [Duplicate(0)]
    assert (box.known(1_000_000), box.known(0)) == (0, 1)


def test_ps_9_a_pool_that_shrank_keeps_all_it_had() -> None:
    box = IdBox(BOX, 1)
    box.restore([b"a", b"b", b"c"], 0, 0)
    assert box.check([b"a", b"c", b"d"], 1) == [Duplicate(0), Duplicate(2), FULL]
    box.validate()


def test_what_a_driver_must_not_do_is_refused_and_changes_nothing() -> None:
    box = IdBox(BOX, 2)
    stored(box, [b"a"], 0, 50)
    box.check([b"b"], 50)
    box.begin([b"b"], 1)
    box.begin([b"b"], 2)
    box.check([b"a"], 50)
    for wrong in (
        lambda: box.begin([b"x"], 1),
        lambda: box.begin([b"x"], 2),
        lambda: box.begin([b"a"], 3),
        lambda: box.begin([b"c", b"c"], 3),
        lambda: box.begin([b"c"], 3),  # full
        lambda: box.accepted(9, 1, 50),
        lambda: box.accepted(2, 1, 50),
        lambda: box.accepted(1, 0, 50),
        lambda: box.accepted(1, 1, 49),
        lambda: box.failed(9),
        lambda: box.withdraw(1),
        lambda: box.restore([b"z"], 1, 50),
        lambda: IdBox(0, 1),
        lambda: IdBox(1, 0),
    ):
        with pytest.raises(ProtocolError):
            wrong()
        box.validate()
    assert box.accepted(1, 1, 50) == (2,)


def test_ps_9_memory_and_work_do_not_grow_with_the_log() -> None:
    box = IdBox(BOX, 50)
    for number in range(5000):
        stored(box, [b"%d" % number, None], 2 * number, 10 * number)
    assert box.known(0) == 10
    assert len(box._offsets) == 10
    assert len(box._batches) <= 21
    box.validate()


# --- The model ------------------------------------------------------------------------------------


@dataclass
class Model:
    """Keeps every batch for ever, and knows nothing but the rules."""

    most: int
    log: list[tuple[int, int, tuple[Id, ...]]] = field(default_factory=list)  # time, base, ids
    flights: dict[Ticket, tuple[Id, ...]] = field(default_factory=dict)
    waiting: list[tuple[Ticket, list[Ticket]]] = field(default_factory=list)

    @property
    def last(self) -> int:
        return max((time for time, _, _ in self.log), default=-(10**9))

    def inside(self, now: int) -> dict[bytes, int]:
        at = max(now, self.last)
        return {
            one: base + i
            for time, base, ids in self.log
            if time + BOX > at
            for i, one in enumerate(ids)
            if one
        }

    def check(self, ids: Sequence[Id], now: int) -> list[Verdict]:
        inside = self.inside(now)
        flying = {one: t for t, batch in self.flights.items() for one in batch if one}
        room = self.most - len(inside) - len(flying)
        verdicts: list[Verdict] = []
        for i, one in enumerate(ids):
            first = ids.index(one)
            if not one:
                verdicts.append(FRESH)
            elif one in inside:
                verdicts.append(Duplicate(inside[one]))
            elif one in flying:
                verdicts.append(Twin(flying[one]))
            elif first < i:
                verdicts.append(Repeat(first) if verdicts[first] == FRESH else FULL)
            else:
                verdicts.append(FRESH if room > 0 else FULL)
                room -= 1
        return verdicts

    def end(self, ticket: Ticket) -> tuple[Ticket, ...]:
        del self.flights[ticket]
        for _, tickets in self.waiting:
            if ticket in tickets:
                tickets.remove(ticket)
        awake = tuple(waiter for waiter, tickets in self.waiting if not tickets)
        self.waiting = [(waiter, tickets) for waiter, tickets in self.waiting if tickets]
        return awake


class Play:
    """A history by chance, of the box and the model side by side."""

    def __init__(self, chance: Random, make: type[IdBox]) -> None:
        self.chance = chance
        self.make = make
        self.most = chance.choice([2, 4, 7, 30])
        self.box = make(BOX, self.most)
        self.model = Model(self.most)
        self.clock = 1000
        self.tickets = 0
        self.wanted: dict[Ticket, list[Id]] = {}  # by those who wait
        self.since: dict[Ticket, int] = {}  # when what is being written was checked
        self.outcomes: set[str] = set()

    def now(self) -> int:
        """A clock that moves, and sometimes jumps and returns."""
        self.clock += self.chance.choice([0, 1, 10, 30])
        if self.chance.random() < 0.05:
            self.clock += self.chance.choice([-150, 150])
        return self.clock + self.chance.choice([0] * 6 + [-200, 500])

    def ids(self) -> list[Id]:
        names: list[Id] = [b"%d" % i for i in range(8)]
        if self.chance.random() < 0.2:
            return self.chance.sample(names, 5)
        return [
            self.chance.choice([None, b"", *names, *names]) for _ in range(self.chance.randrange(5))
        ]

    def publish(self, ticket: Ticket, ids: list[Id]) -> None:
        now = self.now()
        verdicts = self.box.check(ids, now)
        assert verdicts == self.model.check(ids, now)
        self.outcomes |= {type(verdict).__name__ for verdict in verdicts}
        assert self.box.known(now) == len(self.model.inside(now))
        twins = [verdict.ticket for verdict in verdicts if isinstance(verdict, Twin)]
        if twins:
            flying = {one: t for t, batch in self.model.flights.items() for one in batch if one}
            expected = list(dict.fromkeys(flying[one] for one in ids if one and one in flying))
            assert self.box.begin(ids, ticket) == tuple(expected)
            self.model.waiting.append((ticket, expected))
            self.wanted[ticket] = ids
            return
        fresh = [one for one, verdict in zip(ids, verdicts, strict=True) if verdict == FRESH]
        assert self.box.begin(fresh, ticket) == ()
        self.model.flights[ticket] = tuple(fresh)
        self.since[ticket] = now

    def look_again(self, awake: tuple[Ticket, ...], expected: tuple[Ticket, ...]) -> None:
        assert awake == expected
        for ticket in awake:
            self.outcomes.add("woken")
            self.publish(ticket, self.wanted.pop(ticket))

    def accept(self) -> None:
        ticket = self.chance.choice(list(self.model.flights))
        ids = self.model.flights[ticket]
        time = max(self.since[ticket], self.model.last) + self.chance.choice([0, 0, 5, 40])
        ends = [base + len(batch) for _, base, batch in self.model.log]
        base = max(ends, default=0) + self.chance.choice([0, 3])
        awake = self.box.accepted(ticket, base, time)
        self.model.log.append((time, base, ids))
        self.look_again(awake, self.model.end(ticket))

    def fail(self) -> None:
        ticket = self.chance.choice(list(self.model.flights))
        self.look_again(self.box.failed(ticket), self.model.end(ticket))

    def withdraw(self) -> None:
        ticket = self.chance.choice(list(self.wanted))
        self.box.withdraw(ticket)
        del self.wanted[ticket]
        self.model.waiting = [(w, found) for w, found in self.model.waiting if w != ticket]

    def restart(self) -> None:
        """What was being written is lost; the log's tail is all there is."""
        self.outcomes.add("restart")
        self.box = self.make(BOX, self.most)
        for time, base, ids in self.model.log:
            if time > self.model.last - BOX:
                self.box.restore(ids, base, time)
        self.model.flights.clear()
        self.model.waiting.clear()
        self.wanted.clear()

    def step(self) -> None:
        what = self.chance.random()
        if what < 0.45 or not self.model.flights:
            self.tickets += 1
            self.publish(self.tickets, self.ids())
        elif what < 0.75:
            self.accept()
        elif what < 0.9:
            self.fail()
        elif what < 0.95 and self.wanted:
            self.withdraw()
        elif what > 0.97:
            self.restart()
        self.box.validate()

    def one_copy_each(self) -> None:
        """What all of this is for, whatever the model says."""
        accepted: dict[bytes, int] = {}
        for time, _, ids in self.model.log:
            for one in ids:
                if one:
                    assert one not in accepted or accepted[one] + BOX <= time
                    accepted[one] = time


def hunt(make: type[IdBox], seeds: int = 150) -> set[str]:
    outcomes: set[str] = set()
    for seed in range(seeds):
        play = Play(Random(seed), make)
        for _ in range(60):
            play.step()
        play.one_copy_each()
        outcomes |= play.outcomes
    return outcomes


def test_ps_9_histories_by_chance() -> None:
    everything = {"Fresh", "Duplicate", "Twin", "Repeat", "PoolFull", "woken", "restart"}
    assert hunt(IdBox, 400) == everything


@settings(deadline=None, max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(0, 60))
def test_ps_9_histories_that_shrink(chance: Random, steps: int) -> None:
    play = Play(chance, IdBox)
    for _ in range(steps):
        play.step()
    play.one_copy_each()


@pytest.mark.parametrize("seed", range(30))
def test_ps_9_restored_is_the_same_as_lived_through(seed: int) -> None:
    """From any point of the log on, both say the same of every ID at every time."""
    play = Play(Random(seed), IdBox)
    names: list[Id] = [b"%d" % i for i in range(8)]
    for _ in range(50):
        play.step()
        if play.model.flights:
            continue
        restored = IdBox(BOX, play.most)
        for time, base, ids in play.model.log:
            if time > play.model.last - BOX:
                restored.restore(ids, base, time)
        for now in (-500, play.clock - 80, play.clock, play.clock + 60, play.clock + 500):
            assert restored.check(names, now) == play.box.check(names, now)
            assert restored.known(now) == play.box.known(now)
            assert restored.next_expiry(now) == play.box.next_expiry(now)


# --- Mutants: every rule is guarded ---------------------------------------------------------------


class Longer(IdBox):
    """A box lasts a moment too long."""

    def _is_expired(self, time: int) -> bool:
        return time + self.box < self._time


class Timeless(IdBox):
    """What is known is a duplicate, whatever the time."""

    def _is_expired(self, time: int) -> bool:
        return False


class Hasty(IdBox):
    """Lets go of what is over by the clock, before the log is that far."""

    def check(self, ids: Sequence[Id], now: int) -> list[Verdict]:
        last, self._last = self._last, max(now, self._last)
        self._forget_expired()
        self._last = last
        return super().check(ids, now)


class Roomy(IdBox):
    """What is being written does not count."""

    def _free_places(self) -> int:
        return super()._free_places() + len(self._written)


class Optimist(IdBox):
    """What failed counts as stored."""

    def failed(self, ticket: Ticket) -> tuple[Ticket, ...]:
        return self.accepted(ticket, self._end, max(self._last, self._time))


class Impatient(IdBox):
    """Wakes those who wait for others still."""

    def _wake(self, ticket: Ticket) -> tuple[Ticket, ...]:
        awake = tuple(self._waiters.get(ticket, ()))
        for waiter in awake:
            self.withdraw(waiter)
        self._waiters.pop(ticket, None)
        return awake


class Sleepy(IdBox):
    """Does not wake the twins of what failed."""

    def failed(self, ticket: Ticket) -> tuple[Ticket, ...]:
        super().failed(ticket)
        return ()


class Twinless(IdBox):
    """Does not look at what is being written."""

    def _verdicts(self, ids: Sequence[Id]) -> list[Verdict]:
        return [FRESH if isinstance(v, Twin) else v for v in super()._verdicts(ids)]


class Amnesiac(IdBox):
    """Forgets the oldest when the pool is full."""

    def _free_places(self) -> int:
        return max(1, super()._free_places())


@pytest.mark.parametrize(
    "mutant",
    [Longer, Timeless, Hasty, Roomy, Optimist, Impatient, Sleepy, Twinless, Amnesiac],
)
def test_mutants_are_caught(mutant: type[IdBox]) -> None:
    with pytest.raises((AssertionError, ProtocolError)):
        hunt(mutant)
