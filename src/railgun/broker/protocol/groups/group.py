"""A consumer group of one persistent stream: which member gets which message, and when a message is finished.

Rules:

1. **At least once.** Every offset from the group's start on ends acked, buried as a dead letter, or missed (the stream
   no longer has it), which is reported. Until then one member has it, or it will be delivered.
2. **Acks** are for messages in flight with the member that acks, by their delivery number and epoch. Everything else in
   an ack, a nack or `in_progress` is `Stale` and changes nothing; the rest of the same request counts. Each message is
   judged on its own.
3. **Counts.** The n-th counted delivery has the number n. A delivery counts if it ends with a nack, a dead member, an
   `ack_wait` that is over, or the end of the node; not if it ends with a graceful leave, a recall or a seek. A delivery
   that ended because the node did, orderly or not, or because the node no longer serves the member (`send_away`), is no
   **failure**: members prefetch messages, so they never looked at most of those they have. A nack, a dead member and an
   `ack_wait` that is over are failures, and only failures make dead letters.
4. **Credit** is how many messages a member may have in flight. An ack or nack frees it; delayed messages use none. A
   lower credit takes nothing back.
5. **Order and shares.** The lowest offset comes first, so redeliveries come before new messages. Members get shares
   that level their free credit; of equal members, the one that was served longest ago is first. No member ever waits
   for another.
6. **Delays** are at most `LONGEST_DELAY`. They end by the clock that is passed to `tick`. If that clock went back (or
   is another node's), nothing waits longer than its delay from then on; if it leaps ahead, delays end early. The same
   holds for `ack_wait`, which lasts up to a 64th longer than set, so that messages share their timers. An ack that
   comes after `ack_wait`, but before the message was taken back, counts.
   A delay holds back the nacked messages and no others. With `block` it blocks the group: nothing is delivered to its
   members until the delay is over, also after a restart; of several delays, the longest applies. Members keep the
   messages they have. A stale nack blocks nothing; a seek ends the block.
7. **Exclusive groups** stay exclusive, also while they are empty (and shared groups shared): consumers of the other
   kind are refused. An exclusive group has one active member, the one that joined first; the others stand by. It
   receives in stream order: while an offset is delayed, or a letter is being written for it, nothing above it is
   delivered. A nack or an `ack_wait` that is over recalls all messages above it that the member has, so that they come
   again after it. When the active member leaves, its messages are released, and then the next member becomes active.
8. **Epochs** rise when a member becomes the active one, when messages are taken back in an exclusive group, and with
   each seek and redrive. Within an epoch of an exclusive group, offsets rise and none is delivered twice.
9. **Seek** only if no other member is live. Every message below is settled, every message from there on is new, counts
   are reset, nothing counts as acked, and the messages that the member has are recalled.
10. **Trim.** Messages below the first offset that no member has are missed. A message that a member has there may still
    be acked; if it comes back instead, it is missed. Messages missed while there is no member are reported to the next
    that joins, even after a restart.
11. **Restart.** The members are gone, so every message in flight was delivered and is released, by rule 3 without a
    failure. If the stream ends before the group's position (its tail was lost), the group's state of those offsets is
    void: they will be other messages.
12. **Damage.** Messages that cannot be read from the stream are not delivered (`unreadable`). Messages that could not
    be sent for that reason come back at once, and that delivery does not count (`unsent`). A consumer that receives
    nothing more because of damage must be told (`at_damage`): the end of the readable part is not the end of the
    stream.
13. Dead letters have rules of their own: `dead_letters.py`. The state that survives a restart: `persisted.py`. Joining
    and leaving: `members.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import nlargest

from railgun.broker.protocol.groups.explain import Explanation, explain
from railgun.broker.protocol.groups.invariants import check
from railgun.broker.protocol.groups.members import Members
from railgun.broker.protocol.groups.messages import (
    DAY,
    FRESH,
    LONGEST_DELAY,
    MAX_REASON_CHARS,
    BadDelayError,
    Command,
    Deliver,
    Flight,
    GroupBusyError,
    GroupConfig,
    GroupKindError,
    Member,
    OffsetRangeError,
    Recalled,
    Receipt,
    RedriveOutcome,
    Stale,
    Standing,
)
from railgun.broker.protocol.groups.parts import UNBOUNDED, Party
from railgun.broker.protocol.groups.persisted import Redriven, Sought, marks, sought_marks
from railgun.broker.protocol.groups.shares import shares

Claim = tuple[int, int, Flight]


class Group(Members):
    """One group of one persistent stream.

    >>> from railgun.broker.protocol.groups import Group, GroupConfig, Receipt
    >>> group = Group(GroupConfig(), None, start=0, first=0, end=5)
    >>> _ = group.join("ann", now=0), group.grant("ann", 3, now=0)
    >>> group.take(now=1)
    [Deliver(member='ann', first=0, end=3, delivery=1, epoch=0)]
    >>> group.nack("ann", [Receipt(1, 2, 1, 0)], delay=0, reason="not today", now=2)
    []
    >>> group.ack("ann", [Receipt(0, 3, 1, 0)], now=3)
    [Stale(first=1, end=2, delivery=1, epoch=0)]
    >>> for deliver in group.take(now=4):
    ...     (deliver.first, deliver.end, deliver.delivery)
    (1, 2, 2)
    (3, 5, 1)
    """

    __slots__ = ()

    # --- Changes of the stream --------------------------------------------------------------------

    def appended(self, end: int, now: int) -> None:
        """Record that the stream now ends at `end`. Raises `OffsetRangeError` if it ended later before."""
        if end < self.end:
            raise OffsetRangeError(f"the stream ends at {self.end}, and cannot end at {end}")
        self.look_at_clock(now)
        self.end = end

    def trimmed(self, first: int, now: int) -> list[Command]:
        """Record that the stream now begins at `first`; return what the group has missed by that.

        Raises `OffsetRangeError` if `first` is below the first offset or beyond the end.
        """
        if not self.first <= first <= self.end:
            span = f"{self.first} to {self.end}"
            raise OffsetRangeError(f"the stream has {span}, and cannot begin at {first}")
        self.look_at_clock(now)
        self._drop_below(first)
        return self._report_missed()

    def unreadable(self, offset: int) -> None:
        """Record that the stream cannot be read from `offset` on: rule 12."""
        self.readable = min(self.readable, offset)

    def at_damage(self) -> bool:
        """Return whether no readable message is left to deliver, but unreadable ones are."""
        if self.readable == UNBOUNDED or self.next < min(self.readable, self.end):
            return False
        lows = (self.waiting.first, self.delayed.first)
        return all(low is None or low >= self.readable for low in lows)

    def configure(self, config: GroupConfig, now: int) -> None:
        """Replace the settings; they apply to earlier deliveries, too.

        Raises `GroupBusyError` while there are members, because their deliveries were made by the old settings, and
        `GroupKindError` if the group is exclusive and was shared, or the reverse.
        """
        if self.members:
            raise GroupBusyError(
                f"{len(self.members)} members are live: settings change only without members"
            )
        if self.kind not in (None, config.exclusive):
            kind = "exclusive" if self.kind else "shared"
            raise GroupKindError(f"the group is {kind}, and stays so until it is deleted")
        self.look_at_clock(now)
        self.config, self.kind = config, config.exclusive
        pieces = [*self.waiting, *self.delayed]
        pieces += [(first, end, standing) for first, end, (standing, _) in self.dead]
        self.waiting.clear()
        self.delayed.clear()
        self.dead.clear()
        self.timers.clear()
        self.old_at = UNBOUNDED
        for first, end, standing in pieces:
            self.place(first, end, standing)

    # --- Positions --------------------------------------------------------------------------------

    def seek(self, offset: int, now: int, member: Member | None = None) -> list[Command]:
        """Restart the group at an offset. Return the recalls for its member.

        Raises `GroupBusyError` if members other than `member` are live, and `OffsetRangeError` for an offset that the
        stream does not have.
        """
        others = [name for name in self.members if name != member]
        if others:
            raise GroupBusyError(f"{len(others)} other members are live: {', '.join(others[:5])}")
        if not self.first <= offset <= self.end:
            span = f"{self.first} to {self.end}"
            raise OffsetRangeError(f"the stream has {span}, and not {offset}")
        self.look_at_clock(now)
        commands: list[Command] = []
        for party in self.members.values():
            commands += [Recalled(party.name, first, end) for first, end, _ in party.flights]
            party.flights.clear()
            party.spans.clear()
        for place in (self.settled, self.waiting, self.delayed, self.dead, self.unsaved):
            place.clear()
        self.proposed.clear()
        self.timers.clear()
        self.old_at = UNBOUNDED
        self.pause = (0, 0)
        self.logged = (*self.logged[:4], self.pause)  # `Sought` implies it
        self.floor = self.next = offset
        self.highest = -1
        self.epoch += 1
        self.why = "sought"
        self.redriven = sought_marks(self.redriven)
        self.resets = [
            Sought(offset, self.epoch),
            Redriven(0, UNBOUNDED, 0, 0),
            *marks(self.redriven),
        ]
        return commands

    def redrive(
        self, letters: Iterable[tuple[int, int]], now: int
    ) -> tuple[list[RedriveOutcome], list[Command]]:
        """Deliver messages again that were given up.

        A letter is an offset, and how often its message had been redriven before it died. Return the outcome of each
        letter, and the commands for members.
        """
        self.look_at_clock(now)
        pairs = list(letters)
        outcomes = [self.redrive_message(offset, redrives) for offset, redrives in pairs]
        redriven = [
            offset
            for (offset, _), outcome in zip(pairs, outcomes, strict=True)
            if outcome == "redriven"
        ]
        if redriven and self.active is not None:
            return outcomes, self._recall(self.active, min(redriven))
        self.epoch += bool(redriven)
        return outcomes, []

    # --- Requests of members ----------------------------------------------------------------------

    def ack(self, member: Member, receipts: Sequence[Receipt], now: int) -> list[Command]:
        """Settle messages that a member has processed. Return the stale parts of `receipts`."""
        _, claims, stale = self._claim(member, receipts, now)
        for first, end, _ in claims:
            self.settle(first, end)
            self.highest = max(self.highest, end - 1)
        return stale

    def nack(
        self,
        member: Member,
        receipts: Sequence[Receipt],
        delay: int,
        reason: str,
        now: int,
        *,
        block: bool = False,
    ) -> list[Command]:
        """Redeliver messages after `delay` µs; with `block`, block the group for that time.

        Return the stale parts of `receipts`, recalls, and missed messages. Raises `BadDelayError`.
        """
        if not 0 <= delay <= LONGEST_DELAY:
            raise BadDelayError(
                f"a delay of {delay / 1e6:,.0f} seconds: it is from 0 to {LONGEST_DELAY // DAY} days; the messages "
                "stay with their consumer"
            )
        if block and not delay:
            raise BadDelayError("a nack that blocks needs a delay: for how long?")
        party, claims, commands = self._claim(member, receipts, now)
        until = now + delay if delay else 0
        for first, end, flight in claims:
            reason = reason[:MAX_REASON_CHARS]
            standing = Standing(flight.delivery, reason, until, delay, flight.since, flight.spared)
            self.put_back(first, end, standing)
        if claims:
            commands += self._recall(party, min(first for first, _, _ in claims))
        if claims and block:
            self.pause = max(self.pause, (until, delay))
        return commands + self._report_missed()

    def in_progress(self, member: Member, receipts: Sequence[Receipt], now: int) -> list[Command]:
        """Restart `ack_wait` for messages that a member still processes. Return the stale parts of `receipts`."""
        party, claims, stale = self._claim(member, receipts, now, keep=True)
        expires = self.expiry(now)
        if expires is not None:
            for first, end, flight in claims:
                self.put_in_flight(party, first, end, replace(flight, expires=expires))
        return stale

    def unsent(self, member: Member, receipts: Sequence[Receipt], now: int) -> list[Command]:
        """Take back messages that could not be sent to a member; the delivery does not count: rule 12.

        Return the commands for members: what is recalled, as after a nack, and what is missed.
        """
        party, claims, _ = self._claim(member, receipts, now)
        for first, end, flight in claims:
            self.give_back(first, end, flight, None)
        commands = self._recall(party, min(first for first, _, _ in claims)) if claims else []
        return commands + self._report_missed()

    def _claim(
        self, member: Member, receipts: Sequence[Receipt], now: int, *, keep: bool = False
    ) -> tuple[Party, list[Claim], list[Command]]:
        """Find the messages of `receipts` that the member has, by rule 2, and take them from it unless `keep`.

        Return the member, its messages, and the stale parts.
        """
        party = self.party(member)
        for receipt in receipts:
            receipt.check()
        self.look_at_clock(now)
        claims: list[Claim] = []
        stale: list[Command] = []
        for receipt in receipts:
            at, delivery, epoch = receipt.first, receipt.delivery, receipt.epoch
            for claim in party.flights.pieces(receipt.first, receipt.end):
                first, end, flight = claim
                if flight.delivery != delivery or flight.epoch != epoch:
                    continue
                claims.append(claim)
                if not keep:
                    party.flights.remove(first, end)
                if at < first:
                    stale.append(Stale(at, first, delivery, epoch))
                at = end
            if at < receipt.end:
                stale.append(Stale(at, receipt.end, delivery, epoch))
        return party, claims, stale

    def _recall(self, party: Party, lowest: int) -> list[Command]:
        """Recall a member's messages above an offset that came back, so that they come again after it: rule 7."""
        if not self.config.exclusive:
            return []
        self.epoch += 1
        commands: list[Command] = []
        for first, end, flight in party.flights.remove(lowest, UNBOUNDED):
            self.give_back(first, end, flight, None)
            commands.append(Recalled(party.name, first, end))
        return commands

    # --- Delivering -------------------------------------------------------------------------------

    def take(self, now: int) -> list[Deliver]:
        """Deliver as many messages as credit allows, after applying the dead-letter rules."""
        self.look_at_clock(now)
        self.apply_dead_letter_rules(now)
        deliveries: list[Deliver] = []
        if now < self.pause[0]:
            return deliveries
        below = self.blocked()
        ready = self.ready_below(below)
        if not ready:
            return deliveries
        for party, share in self._shares(ready):
            self.turn += 1
            party.turn = self.turn
            while share:
                first, end, standing = self._lowest(share, below)
                share -= end - first
                deliver = self.hand_out(party, first, end, standing, now)
                if deliveries and _continues(deliveries[-1], deliver):
                    first = deliveries.pop().first
                    deliver = Deliver(party.name, first, end, deliver.delivery, self.epoch)
                deliveries.append(deliver)
        return deliveries

    def blocked(self) -> int:
        """Return the offset from which on nothing is delivered, by rule 7 or rule 12; `UNBOUNDED` if there is none."""
        if not self.config.exclusive:
            return self.readable
        lows = [self.readable, self.delayed.first, self.dead.first]
        lows.append(min(self.proposed, default=None))
        return min(low for low in lows if low is not None)

    def _shares(self, ready: int) -> list[tuple[Party, int]]:
        """Return how many ready messages each member gets, in the order of serving: rule 5."""
        parties: Iterable[Party] = self.members.values()
        if self.config.exclusive:
            parties = () if self.active is None else (self.active,)
        able = [party for party in parties if party.free > 0]  # with free credit
        able = nlargest(min(ready, len(able)), able, key=lambda party: (party.free, -party.turn))
        counts = shares([party.free for party in able], ready)
        return [(party, share) for party, share in zip(able, counts, strict=True) if share]

    def _lowest(self, most: int, below: int) -> tuple[int, int, Standing]:
        """Take up to `most` of the lowest ready messages, all below `below`. Return their range and standing."""
        piece = self.waiting.pop(most, below)
        if piece is not None:
            return piece
        first = self.next
        self.next = min(first + most, self.end, below)
        return first, self.next, FRESH

    # --- Time -------------------------------------------------------------------------------------

    def tick(self, now: int) -> list[Command]:
        """End delays that are over, and take back messages that a member had for longer than `ack_wait`."""
        self.look_at_clock(now)
        if self.pause[0] <= now:
            self.pause = (0, 0)
        expired: dict[Member, int] = {}  # member → lowest offset taken back
        while self.timers and self.timers[0].at <= now:
            _, first, end, member = self.next_timer()
            if not member:
                for low, high, standing in self.delayed.pieces(first, end):
                    if standing.until <= now:
                        self.delayed.remove(low, high)
                        self.waiting.set(low, high, standing)
            elif member in self.members:
                lowest = self._expire(self.members[member], first, end, now)
                expired[member] = min(lowest, expired.get(member, UNBOUNDED))
        commands: list[Command] = []
        for member, lowest in expired.items():
            if lowest < UNBOUNDED:
                commands += self._recall(self.members[member], lowest)
        return commands + self._report_missed()

    def _expire(self, party: Party, first: int, end: int, now: int) -> int:
        """Take back deliveries past their `ack_wait`: rule 3. Return the lowest offset, or `UNBOUNDED` if none."""
        lowest = UNBOUNDED
        for low, high, flight in party.flights.pieces(first, end):
            if flight.expires is not None and flight.expires <= now:
                party.flights.remove(low, high)
                self.give_back(low, high, flight, "no answer within ack_wait")
                lowest = min(low, lowest)
        return lowest

    # --- Inspection -------------------------------------------------------------------------------

    def explain(self, now: int) -> Explanation:
        """Return why the group receives nothing, or what it is doing."""
        return explain(self, self.blocked(), now)

    def validate(self) -> None:
        """Raise `ProtocolError` if the state violates an invariant; for tests."""
        check(self)


def _continues(first: Deliver, second: Deliver) -> bool:
    """Return whether `second` directly continues `first`, so that both can be one delivery."""
    return (
        first.member == second.member
        and first.end == second.first
        and first.delivery == second.delivery
    )
