"""The state of a group: the place of each message, and the operations that move messages between places.

Every message that was ever examined is in exactly one place::

    settled     acked, buried or missed: below `floor`, or in `settled` above it
    in flight   with one member, in its `flights`
    waiting     to be delivered, the lowest first
    delayed     until a time
    dead        given up by a dead-letter rule; waits for `letters` to propose it
    proposed    as a dead letter; waits for `buried` or `kept`

Messages from `next` to `end` are new: never examined. Each place is a few `Ranges`, so moving a thousand adjacent
messages costs as much as moving one. Every move is also recorded in `unsaved`, from which `changes` is made.

The caller passes the time. Timers are in one heap and stay there when their messages have moved on: such a stale timer
does nothing when it fires, and when there are many of them, all timers are built anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush

from railgun.broker.protocol.groups.messages import (
    FRESH,
    MAX_REASON_CHARS,
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
    MIN_TIMER_LIMIT,
    UNBOUNDED,
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
    Unreported,
    Unsettled,
    settle,
)
from railgun.broker.protocol.groups.ranges import Ranges


class State:
    """The place of each message of one group."""

    __slots__ = (
        "active",
        "config",
        "dead",
        "delayed",
        "end",
        "epoch",
        "first",
        "flight",
        "floor",
        "highest",
        "kind",
        "last_time",
        "logged",
        "members",
        "missed",
        "next",
        "old_at",
        "pause",
        "proposed",
        "readable",
        "redriven",
        "resets",
        "settled",
        "standing",
        "timer_limit",
        "timers",
        "turn",
        "unreported",
        "unsaved",
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
        """Whether the group is exclusive. None: unknown, and the next consumer decides."""
        self.config = config if self.kind is None else replace(config, exclusive=self.kind)
        self.readable = UNBOUNDED
        """The stream cannot be read from this offset on, so nothing from here on is delivered."""
        self.first = first  # the stream's first offset
        self.end = end  # one past the stream's last offset
        self.why: Why = "start" if saved is None else "tracked"
        # Changes that `changes` has not returned yet.
        self.resets: list[Change] = []  # changes that invalidate earlier ones; they come first
        self.unsaved: Ranges[Standing | None] = Ranges()  # None: settled
        if saved is None:
            saved = Saved(floor=start)
            self.resets.append(Sought(start, 0))
        else:
            saved = saved.copy()
            if saved.end > end or saved.highest >= end:
                self.resets.append(Cut(end))
                saved.apply(Cut(end))
        self.floor = saved.floor  # all messages below are settled
        self.settled = saved.done  # above the floor
        self.epoch = saved.epoch
        self.highest = saved.highest  # the highest offset acked since the group began
        self.unreported = saved.unreported  # missed while the group had no member
        self.redriven = saved.redriven  # which messages were redriven, and how often
        self.pause = saved.pause  # the end of a block and its length: see `Paused`
        self.logged = (self.epoch, self.highest, list(self.unreported), saved.exclusive, self.pause)
        self.missed: Ranges[None] = Ranges()  # in the current step
        self.members: dict[Member, Party] = {}  # in the order they joined
        self.active: Party | None = None  # the active member of an exclusive group
        self.turn = 0
        self.waiting: Ranges[Standing] = Ranges()
        self.delayed: Ranges[Standing] = Ranges()
        self.dead: Ranges[Proposal] = Ranges()
        self.proposed: dict[int, Proposal] = {}
        # The flight and the standing created last: reused, as many messages have equal ones.
        self.flight: Flight | None = None
        self.standing = FRESH
        self.timers: list[Timer] = []
        self.timer_limit = MIN_TIMER_LIMIT  # with more timers than this, all are built anew
        self.last_time: int | None = None  # the last time that a caller passed
        self.old_at = UNBOUNDED  # no waiting or delayed message reaches `max_age` before this time
        self.next = saved.end
        self._load(saved)
        self._drop_below(first)
        self._report_missed()

    def _load(self, saved: Saved) -> None:
        """Put saved messages into their places; messages between them are new."""
        if self.floor < self.next:
            self.waiting.set(self.floor, self.next, FRESH)
        for first, end, _ in saved.done:
            self.waiting.remove(first, end)
        for first, end, standing in saved.open:
            self.waiting.remove(first, end)
            self.place(first, end, standing)

    # --- Moves ------------------------------------------------------------------------------------

    def settle(self, first: int, end: int) -> None:
        """Finish messages. They must be in no other place."""
        self.floor = settle(self.settled, self.floor, first, end)
        self.unsaved.set(first, end, None)

    def place(self, first: int, end: int, standing: Standing) -> None:
        """Put messages that no member has into the place that their standing requires."""
        rule = self.delivered_too_often(standing)
        if rule is not None:
            self.dead.set(first, end, Proposal(standing, rule))
            return
        self.old_at = min(self.old_at, self.too_old_at(standing))
        if standing.until and (self.last_time is None or standing.until > self.last_time):
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

    def hand_out(self, party: Party, first: int, end: int, standing: Standing, now: int) -> Deliver:
        """Deliver waiting or new messages, which all have this standing, to a member."""
        delivery = standing.count + 1
        since = self.noted_time(now) if standing.since is None else standing.since
        flight = Flight(
            delivery, self.epoch, self.expiry(now), standing.reason, since, standing.spared
        )
        if flight == self.flight:
            flight = self.flight
        else:
            self.flight = flight
            self.standing = self.standing_without_failure(flight)
        self.put_in_flight(party, first, end, flight)
        self.unsaved.set(first, end, self.standing)
        return Deliver(party.name, first, end, delivery, self.epoch)

    def put_in_flight(self, party: Party, first: int, end: int, flight: Flight) -> None:
        """Put messages in flight with a member. Flights of one member with the same expiry share one timer."""
        party.flights.set(first, end, flight)
        at = flight.expires
        if at is None:
            return
        low, high = party.spans.get(at, (first, end))
        has_timer = at in party.spans
        party.spans[at] = min(low, first), max(high, end)
        if not has_timer:
            self.set_timer(Timer(at, 0, 0, party.name))

    def ready_below(self, offset: int) -> int:
        """Return how many messages below an offset are waiting or new."""
        if offset == UNBOUNDED:
            return self.waiting.total + self.end - self.next
        waiting = sum(end - first for first, end, _ in self.waiting.pieces(0, offset))
        return waiting + max(0, min(self.end, offset) - self.next)

    def expiry(self, now: int) -> int | None:
        """Return when a delivery made now is taken back: after `ack_wait`, plus at most a `ROUNDING_PARTS`-th of it."""
        wait = self.config.ack_wait
        return None if wait is None else rounded_up(now + wait, wait)

    def noted_time(self, now: int) -> int | None:
        """Return the time to record for a first delivery at `now`, or None without `max_age`.

        It is rounded up by at most a `ROUNDING_PARTS`-th of `max_age`, so that messages delivered at about the same
        time share one range.
        """
        age = self.config.max_age
        return None if age is None else rounded_up(now, age)

    def too_old_at(self, standing: Standing) -> int:
        """Return when messages of this standing reach `max_age`; `UNBOUNDED` if they never do."""
        age = self.config.max_age
        return UNBOUNDED if age is None or standing.since is None else standing.since + age

    def give_back(self, first: int, end: int, flight: Flight, reason: str | None) -> None:
        """Take messages from their member after a failed delivery. `reason` None: the delivery does not count."""
        if reason is None:  # if none failed before, there is no first failed delivery
            since = flight.since if flight.failures else None
            spared = flight.spared
            standing = Standing(flight.delivery - 1, flight.reason, since=since, spared=spared)
        else:
            reason = reason[:MAX_REASON_CHARS]
            standing = Standing(flight.delivery, reason, since=flight.since, spared=flight.spared)
        self.put_back(first, end, standing)

    def standing_without_failure(self, flight: Flight) -> Standing:
        """Return the standing of a member's messages after its node ended or no longer serves it.

        The delivery counts, because the member may have seen the messages. It is not a failure, because nobody reported
        one.
        """
        since = flight.since if flight.failures else None
        return Standing(flight.delivery, flight.reason, since=since, spared=flight.spared + 1)

    def put_back(self, first: int, end: int, standing: Standing) -> None:
        """Put messages that a member had into their place again; those that the stream has lost are missed."""
        if first < self.first:
            self.miss(first, min(end, self.first))
            first = self.first
        if first < end:
            self.place(first, end, standing)
            self.unsaved.set(first, end, standing)

    def miss(self, first: int, end: int) -> None:
        """Record messages as missed: the stream no longer has them."""
        self.settle(first, end)
        self.missed.set(first, end, None)

    def _drop_below(self, first: int) -> None:
        """Record that the stream begins at `first`: messages below that no member has are missed."""
        self.first = first
        if self.redriven.remove(0, first):
            self.resets.append(Redriven(0, first, 0, 0))
        for place in (self.waiting, self.delayed, self.dead):
            for low, high, _ in place.remove(0, first):
                self.miss(low, high)
        for offset in sorted(offset for offset in self.proposed if offset < first):
            del self.proposed[offset]
            self.miss(offset, offset + 1)
        if self.next < first:
            self.miss(self.next, first)
            self.next = first

    def _report_missed(self) -> list[Command]:
        """Return the messages missed in this step; keep them for the next member that joins if there is none now."""
        commands: list[Command] = [Missed(first, end) for first, end, _ in self.missed]
        if not self.members:
            for first, end, _ in self.missed:
                self.unreported.set(first, end, None)
        self.missed.clear()
        return commands

    # --- Time -------------------------------------------------------------------------------------

    def look_at_clock(self, now: int) -> None:
        """Record the time. If the clock went back, let nothing wait longer than its delay, counted from now."""
        back = self.last_time is None or now < self.last_time
        self.last_time = now
        if back:
            self._set_back(now)

    def _set_back(self, now: int) -> None:
        """Adjust all times to a clock that went back to `now`."""
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
                    self.unsaved.set(first, end, self.standing_without_failure(sooner))
        until, delay = self.pause
        self.pause = (min(until, now + delay), delay)
        self.old_at = min(self._age_deadlines(), default=UNBOUNDED)
        self._set_timers()

    def _set_standing_back(self, first: int, end: int, was: Standing, now: int) -> Standing:
        """Return the standing with no time later than if the clock had always been this one."""
        until = min(was.until, now + was.delay) if was.delay else was.until
        standing = replace(was, until=until, since=earlier(was.since, self.noted_time(now)))
        if standing == was:
            return was
        self.unsaved.set(first, end, standing)
        return standing

    def _age_deadlines(self) -> Iterator[int]:
        """Yield when each waiting or delayed range reaches `max_age`."""
        for place in (self.waiting, self.delayed):
            for _, _, standing in place:
                yield self.too_old_at(standing)

    def set_timer(self, timer: Timer) -> None:
        """Add a timer. Build all timers anew when most of them may be stale."""
        heappush(self.timers, timer)
        if len(self.timers) > self.timer_limit:
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
        self.timer_limit = max(MIN_TIMER_LIMIT, 2 * len(timers))

    def _is_stale(self, timer: Timer) -> bool:
        """Return whether the timer is stale: nothing it covers is due at its time."""
        if not timer.member:
            delayed = self.delayed.pieces(timer.first, timer.end)
            return all(standing.until > timer.at for _, _, standing in delayed)
        party = self.members.get(timer.member)
        if party is None:
            return True
        flights = party.flights.pieces(*party.spans.get(timer.at, (0, 0)))
        return all(flight.expires is None or flight.expires > timer.at for _, _, flight in flights)

    def deadline(self) -> int | None:
        """Return when `tick`, `take` and `letters` must be called if no event comes before, or None.

        `max_age` may give too early a time, once: the messages due then have been settled or are in flight.
        """
        while self.timers and self._is_stale(self.timers[0]):
            self.next_timer()
        at = min(
            self.old_at, self.pause[0] or UNBOUNDED, self.timers[0].at if self.timers else UNBOUNDED
        )
        return None if at == UNBOUNDED else at

    def next_timer(self) -> Timer:
        """Remove and return the earliest timer, with the offsets it covers."""
        timer = heappop(self.timers)
        party = self.members.get(timer.member)
        if party is None:
            return timer
        first, end = party.spans.pop(timer.at, (0, 0))
        return Timer(timer.at, first, end, timer.member)

    # --- Persistence ------------------------------------------------------------------------------

    def party(self, member: Member) -> Party:
        """Return the state of a member. Raises `NotMemberError` if there is no member of that name."""
        party = self.members.get(member)
        if party is None:
            raise NotMemberError(f"{member!r} is not a member of this group: it has to join first")
        return party

    def save(self) -> Saved:
        """Return a copy of everything that survives a restart."""
        saved = Saved(self.floor, self.settled.copy(), Ranges(), self.epoch, self.highest)
        saved.unreported = self.unreported.copy()
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
                saved.open.set(first, end, self.standing_without_failure(flight))
        for offset, proposal in self.proposed.items():
            if proposal.standing != FRESH:
                saved.open.set(offset, offset + 1, proposal.standing)
        return saved

    def changes(self) -> list[Change]:
        """Return the changes since the last call, to be appended to the group's log.

        All changes since the beginning, applied in order, make what `save` returns.
        """
        epoch, highest, unreported, kind, pause = self.logged
        changes: list[Change] = self.resets
        if (epoch, highest) != (self.epoch, self.highest):
            changes.append(Stands(self.epoch, self.highest))
        if self.kind is not None and kind != self.kind:
            changes.append(Kind(self.kind))
        if pause != self.pause:
            changes.append(Paused(*self.pause))
        for first, end, standing in self.unsaved:
            changes.append(
                Settled(first, end) if standing is None else Unsettled(first, end, standing)
            )
        if unreported != (untold_now := list(self.unreported)):
            changes.append(Unreported(tuple((first, end) for first, end, _ in untold_now)))
        self.logged = (self.epoch, self.highest, untold_now, self.kind, self.pause)
        self.resets = []
        self.unsaved.clear()
        return changes
