"""What every rule of a group works with: where each message is, and the few verbs that move messages.

A message that was ever looked at is in exactly one place::

    settled     acked, buried or missed: below `floor`, or in `settled` above it
    in flight   with one member, in its `flights`
    waiting     to be delivered, the lowest first
    delayed     until a time
    dead        given up by a dead-letter rule; it waits for `letters` to propose it
    proposed    as a dead letter; it waits for `buried` or `kept`

Those from `next` to `end` were never looked at. Each place is a few `Ranges`, so that moving a thousand messages
that are together is moving one. Every move is also written to `unsaved`, which is what `changes` tells.

Time is what the caller says. Timers lie in one heap and are not taken out when what they were for is gone: a timer
that finds nothing to do does nothing, and when there are many of those, all are made anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush

from railgun.broker.protocol.groups.messages import (
    FRESH,
    LONGEST_REASON,
    Command,
    Deliver,
    Flight,
    GroupConfig,
    Member,
    Missed,
    NotMemberError,
    OffsetRangeError,
    Rule,
    Standing,
    Why,
)
from railgun.broker.protocol.groups.parts import (
    FAR,
    FEW,
    Party,
    Proposal,
    Timer,
    earlier,
    rounded_up,
)
from railgun.broker.protocol.groups.persisted import (
    Change,
    Cut,
    Kind,
    Paused,
    Redriven,
    Saved,
    Settled,
    Sought,
    Stands,
    Unsettled,
    Untold,
    settle,
)
from railgun.broker.protocol.groups.ranges import Ranges


class State:
    """Where the messages of one group are."""

    __slots__ = (
        "active",
        "config",
        "crowd",
        "dead",
        "delayed",
        "end",
        "epoch",
        "first",
        "flight",
        "floor",
        "highest",
        "kind",
        "members",
        "missed",
        "next",
        "old_at",
        "pause",
        "proposed",
        "readable",
        "redriven",
        "seen",
        "settled",
        "standing",
        "timers",
        "told",
        "turn",
        "unsaved",
        "untold",
        "voids",
        "waiting",
        "why",
    )  # fmt: skip

    def __init__(
        self, config: GroupConfig, saved: Saved | None, start: int, first: int, end: int
    ) -> None:
        if not 0 <= first <= end:
            raise OffsetRangeError(f"no stream begins at {first} and ends at {end}")
        if saved is None and not first <= start <= end:
            raise OffsetRangeError(f"the start {start} is not in the stream: {first} to {end}")
        self.kind = config.exclusive if saved is None else saved.exclusive
        """Whether the group is exclusive. None: it is not known, and the next consumer decides."""
        self.config = config if self.kind is None else replace(config, exclusive=self.kind)
        self.readable = FAR
        """The stream cannot be read from this offset on: nothing from there on is delivered."""
        self.first = first  # of the stream
        self.end = end  # of the stream
        self.why: Why = "start" if saved is None else "tracked"
        # What was not told to the log yet.
        self.voids: list[Change] = []  # what makes void what was told before
        self.unsaved: Ranges[Standing | None] = Ranges()  # None: settled
        if saved is None:
            saved = Saved(floor=start)
            self.voids.append(Sought(start, 0))
        else:
            saved = saved.copy()
            if saved.end > end or saved.highest >= end:
                self.voids.append(Cut(end))
                saved.apply(Cut(end))
        self.floor = saved.floor  # all below are settled
        self.settled = saved.done  # above the floor
        self.epoch = saved.epoch
        self.highest = saved.highest  # acked, since the group began
        self.untold = saved.untold  # missed while nobody was there
        self.redriven = saved.redriven  # which messages were redriven, and how often
        self.pause = saved.pause  # until when nothing is delivered, and for how long
        self.told = (self.epoch, self.highest, list(self.untold), saved.exclusive, self.pause)
        self.missed: Ranges[None] = Ranges()  # in the present step
        self.members: dict[Member, Party] = {}  # in the order they joined
        self.active: Party | None = None  # who receives, in an exclusive group
        self.turn = 0
        self.waiting: Ranges[Standing] = Ranges()
        self.delayed: Ranges[Standing] = Ranges()
        self.dead: Ranges[Proposal] = Ranges()
        self.proposed: dict[int, Proposal] = {}
        # The last ones that were made, as many messages share them.
        self.flight: Flight | None = None
        self.standing = FRESH
        self.timers: list[Timer] = []
        self.crowd = FEW  # how many timers are too many
        self.seen: int | None = None  # the last time we were told
        self.old_at = FAR  # no message that waits or is delayed reaches `max_age` before this time
        self.next = saved.end
        self._take_up(saved)
        self._drop_below(first)
        self._tell_missed()

    def _take_up(self, saved: Saved) -> None:
        """Put what was saved where it belongs; gaps between are as new."""
        if self.floor < self.next:
            self.waiting.set(self.floor, self.next, FRESH)
        for first, end, _ in saved.done:
            self.waiting.remove(first, end)
        for first, end, standing in saved.open:
            self.waiting.remove(first, end)
            self.place(first, end, standing)

    # --- Moves ------------------------------------------------------------------------------------

    def settle(self, first: int, end: int) -> None:
        """The group has finished with these; they are in no other place any more."""
        self.floor = settle(self.settled, self.floor, first, end)
        self.unsaved.set(first, end, None)

    def place(self, first: int, end: int, standing: Standing) -> None:
        """Messages that nobody has are put where their standing says."""
        rule = self.delivered_too_often(standing)
        if rule is not None:
            self.dead.set(first, end, Proposal(standing, rule))
            return
        self.old_at = min(self.old_at, self.too_old_at(standing))
        if standing.until and (self.seen is None or standing.until > self.seen):
            self.delayed.set(first, end, standing)
            self.set_timer(Timer(standing.until, first, end))
        else:
            self.waiting.set(first, end, standing)

    def delivered_too_often(self, standing: Standing) -> Rule | None:
        """Return the dead-letter rule that gives messages up for how many of their deliveries failed, or None."""
        most, distance = self.config.max_deliveries, self.config.distance
        if most is not None and standing.failures >= most:
            return "dead_deliveries"
        if distance is not None and standing.failures > distance:
            return "dead_distance"
        return None

    def hand_out(self, party: Party, first: int, end: int, was: Standing, now: int) -> Deliver:
        """Messages that wait, or are new, go to a member."""
        delivery = was.count + 1
        since = self.noted_time(now) if was.since is None else was.since
        flight = Flight(delivery, self.epoch, self.expiry(now), was.reason, since, was.spared)
        if flight == self.flight:
            flight = self.flight
        else:
            self.flight = flight
            self.standing = self.left_alone(flight)
        self.fly(party, first, end, flight)
        self.unsaved.set(first, end, self.standing)
        return Deliver(party.name, first, end, delivery, self.epoch)

    def fly(self, party: Party, first: int, end: int, flight: Flight) -> None:
        """A member has messages, on these terms. Its messages of one expiry have one timer."""
        party.flights.set(first, end, flight)
        at = flight.expires
        if at is None:
            return
        low, high = party.spans.get(at, (first, end))
        known = at in party.spans
        party.spans[at] = min(low, first), max(high, end)
        if not known:
            self.set_timer(Timer(at, 0, 0, party.name))

    def ready_below(self, offset: int) -> int:
        """Return how many messages below an offset wait or are new."""
        if offset == FAR:
            return self.waiting.total + self.end - self.next
        waiting = sum(end - first for first, end, _ in self.waiting.pieces(0, offset))
        return waiting + max(0, min(self.end, offset) - self.next)

    def expiry(self, now: int) -> int | None:
        """When a delivery of now is taken back: after `ack_wait`, and up to a `GRAINS`-th of it later."""
        wait = self.config.ack_wait
        return None if wait is None else rounded_up(now + wait, wait)

    def noted_time(self, now: int) -> int | None:
        """Return the time to note for a first delivery at `now`: up to a `GRAINS`-th of `max_age` later, so that
        messages delivered at about the same time share one range. None without `max_age`."""
        age = self.config.max_age
        return None if age is None else rounded_up(now, age)

    def too_old_at(self, standing: Standing) -> int:
        """Return when messages of this standing reach `max_age`; `FAR` if they never do."""
        age = self.config.max_age
        return FAR if age is None or standing.since is None else standing.since + age

    def give_back(self, first: int, end: int, flight: Flight, reason: str | None) -> None:
        """Messages that a member had are nobody's. `reason` None: the delivery does not count."""
        if reason is None:  # and if none failed before, none was the first
            since = flight.since if flight.failures else None
            spared = flight.spared
            standing = Standing(flight.delivery - 1, flight.reason, since=since, spared=spared)
        else:
            told = reason[:LONGEST_REASON]
            standing = Standing(flight.delivery, told, since=flight.since, spared=flight.spared)
        self.put_back(first, end, standing)

    def left_alone(self, flight: Flight) -> Standing:
        """Return how messages stand that a member had when its node ended, or served it no more.

        The delivery counts, for the member may have seen them; it is no failure, for nobody said so.
        """
        since = flight.since if flight.failures else None
        return Standing(flight.delivery, flight.reason, since=since, spared=flight.spared + 1)

    def put_back(self, first: int, end: int, standing: Standing) -> None:
        """Messages are nobody's, and stand like this; those that the stream has lost meanwhile are missed."""
        if first < self.first:
            self.miss(first, min(end, self.first))
            first = self.first
        if first < end:
            self.place(first, end, standing)
            self.unsaved.set(first, end, standing)

    def miss(self, first: int, end: int) -> None:
        """The stream does not have these any more."""
        self.settle(first, end)
        self.missed.set(first, end, None)

    def _drop_below(self, first: int) -> None:
        """The stream begins here: what nobody has below it is missed."""
        self.first = first
        if self.redriven.remove(0, first):
            self.voids.append(Redriven(0, first, 0, 0))
        for place in (self.waiting, self.delayed, self.dead):
            for low, high, _ in place.remove(0, first):
                self.miss(low, high)
        for offset in sorted(offset for offset in self.proposed if offset < first):
            del self.proposed[offset]
            self.miss(offset, offset + 1)
        if self.next < first:
            self.miss(self.next, first)
            self.next = first

    def _tell_missed(self) -> list[Command]:
        """What was missed in this step. Nobody there: who joins next is told, too."""
        told: list[Command] = [Missed(first, end) for first, end, _ in self.missed]
        if not self.members:
            for first, end, _ in self.missed:
                self.untold.set(first, end, None)
        self.missed.clear()
        return told

    # --- Time -------------------------------------------------------------------------------------

    def look_at_clock(self, now: int) -> None:
        """Notice a clock that went back: nothing waits longer than it was to wait, counted from now."""
        back = self.seen is None or now < self.seen
        self.seen = now
        if back:
            self._set_back(now)

    def _set_back(self, now: int) -> None:
        """The clock has gone back to this."""
        for place in (self.waiting, self.delayed):
            for first, end, standing in list(place):
                place.set(first, end, self._set_standing_back(first, end, standing, now))
        for first, end, (standing, rule) in list(self.dead):
            standing = self._set_standing_back(first, end, standing, now)
            self.dead.set(first, end, Proposal(standing, rule))
        for offset, (standing, rule) in self.proposed.items():
            standing = self._set_standing_back(offset, offset + 1, standing, now)
            self.proposed[offset] = Proposal(standing, rule)
        for party in self.members.values():
            for first, end, flight in list(party.flights):
                sooner = replace(
                    flight,
                    expires=earlier(flight.expires, self.expiry(now)),
                    since=earlier(flight.since, self.noted_time(now)),
                )
                party.flights.set(first, end, sooner)
                if sooner.since != flight.since:
                    self.unsaved.set(first, end, self.left_alone(sooner))
        until, delay = self.pause
        self.pause = (min(until, now + delay), delay)
        self.old_at = min(self._ages(), default=FAR)
        self._set_timers()

    def _set_standing_back(self, first: int, end: int, was: Standing, now: int) -> Standing:
        """Return a standing whose times are not later than if the clock had always been this one."""
        until = min(was.until, now + was.delay) if was.delay else was.until
        standing = replace(was, until=until, since=earlier(was.since, self.noted_time(now)))
        if standing == was:
            return was
        self.unsaved.set(first, end, standing)
        return standing

    def _ages(self) -> Iterator[int]:
        """Yield when messages that wait or are delayed reach `max_age`."""
        for place in (self.waiting, self.delayed):
            for _, _, standing in place:
                yield self.too_old_at(standing)

    def set_timer(self, timer: Timer) -> None:
        """Look at some messages at a time. When most timers are for nothing, all are made anew."""
        heappush(self.timers, timer)
        if len(self.timers) > self.crowd:
            self._set_timers()

    def _set_timers(self) -> None:
        timers = [Timer(standing.until, first, end) for first, end, standing in self.delayed]
        for party in self.members.values():
            spans = party.spans
            spans.clear()
            for first, end, flight in party.flights:
                if flight.expires is not None:
                    low, _ = spans.get(flight.expires, (first, end))
                    spans[flight.expires] = low, end
            timers += [Timer(at, 0, 0, party.name) for at in spans]
        heapify(timers)
        self.timers = timers
        self.crowd = max(FEW, 2 * len(timers))

    def _idle(self, timer: Timer) -> bool:
        """Whether there is nothing to do at this time for what the timer was for."""
        if not timer.member:
            delayed = self.delayed.pieces(timer.first, timer.end)
            return all(standing.until > timer.at for _, _, standing in delayed)
        party = self.members.get(timer.member)
        if party is None:
            return True
        flights = party.flights.pieces(*party.spans.get(timer.at, (0, 0)))
        return all(flight.expires is None or flight.expires > timer.at for _, _, flight in flights)

    def deadline(self) -> int | None:
        """When `tick`, `take` and `letters` are to be called, if nothing happens before.

        `max_age` may ask for it too early, once: those that were to be given up then are settled or with a member.
        """
        while self.timers and self._idle(self.timers[0]):
            self.next_timer()
        at = min(self.old_at, self.pause[0] or FAR, self.timers[0].at if self.timers else FAR)
        return None if at == FAR else at

    def next_timer(self) -> Timer:
        """Take the earliest timer, with what it is for."""
        timer = heappop(self.timers)
        party = self.members.get(timer.member)
        if party is None:
            return timer
        first, end = party.spans.pop(timer.at, (0, 0))
        return Timer(timer.at, first, end, timer.member)

    # --- What survives ----------------------------------------------------------------------------

    def party(self, member: Member) -> Party:
        """The member of that name."""
        party = self.members.get(member)
        if party is None:
            raise NotMemberError(f"{member!r} is not a member of this group: it has to join first")
        return party

    def save(self) -> Saved:
        """All that survives."""
        saved = Saved(self.floor, self.settled.copy(), Ranges(), self.epoch, self.highest)
        saved.untold = self.untold.copy()
        saved.exclusive, saved.pause, saved.redriven = self.kind, self.pause, self.redriven.copy()
        for place in (self.waiting, self.delayed):
            for first, end, standing in place:
                if standing != FRESH:
                    saved.open.set(first, end, standing)
        for first, end, (standing, _) in self.dead:
            if standing != FRESH:
                saved.open.set(first, end, standing)
        for party in self.members.values():
            for first, end, flight in party.flights:
                saved.open.set(first, end, self.left_alone(flight))
        for offset, proposal in self.proposed.items():
            if proposal.standing != FRESH:
                saved.open.set(offset, offset + 1, proposal.standing)
        return saved

    def changes(self) -> list[Change]:
        """What the log of the group has to append, to know what `save` would tell now."""
        epoch, highest, untold, kind, pause = self.told
        told: list[Change] = self.voids
        if (epoch, highest) != (self.epoch, self.highest):
            told.append(Stands(self.epoch, self.highest))
        if self.kind is not None and kind != self.kind:
            told.append(Kind(self.kind))
        if pause != self.pause:
            told.append(Paused(*self.pause))
        for first, end, standing in self.unsaved:
            told.append(
                Settled(first, end) if standing is None else Unsettled(first, end, standing)
            )
        if untold != (now_untold := list(self.untold)):
            told.append(Untold(tuple((first, end) for first, end, _ in now_untold)))
        self.told = (self.epoch, self.highest, now_untold, self.kind, self.pause)
        self.voids = []
        self.unsaved.clear()
        return told
