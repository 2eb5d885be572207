"""Dead letters: messages that a group gives up, so that it does not stumble over them for ever.

Rules:

1. A message that is not settled and that no member has becomes a letter
   - `max_deliveries`: when it was delivered so often, by count, and came back (nacked, or its member died or kept
     it too long). It is not delivered again, and does not wait for the delay of its last nack.
   - `distance`: when the highest acked offset since the group began is more than `distance` ahead of it, be it
     delayed or not. After a seek nothing counts as acked.
   - `max_age`: when it was stored longer ago than that, even if it was never delivered.
   The first rule in this order that fits is told.
2. The letter is written before the group moves on. `letters` proposes each once; while proposed it is delivered to
   nobody. `buried`: it is settled. `kept`: the letter could not be written, and the message stands as before; if a
   rule still fits, the next call of `letters` proposes it again. So a driver whose dead letters fail waits before
   it asks again.
3. An answer to a letter that is not proposed (any more: the group sought, or the stream was trimmed) changes
   nothing.
4. Proposals do not survive a restart: they are made again, and the dead letters see to it that each is there once.
5. Stored times never step back, so those that are too old are the lowest ones, and are found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable

from railgun.core.delivery.messages import FRESH, Bury, Rule, Standing
from railgun.core.delivery.ranges import Ranges
from railgun.core.delivery.state import FAR, Proposal, State

TimeOf = Callable[[int], int]


class Letters(State):
    """The part of a group that gives messages up."""

    __slots__ = ()

    def letters(self, now: int, time_of: TimeOf, most: int = 1000) -> list[Bury]:
        """Up to so many new letters. `time_of` tells when a message was stored; asked with `max_age` only."""
        self.look_at_clock(now)
        told: list[Bury] = []
        self._propose(self.spent, FAR, most, "max_deliveries", told)
        config = self.config
        if config.distance is not None:
            limit = self.highest - config.distance
            for place in (self.waiting, self.delayed):
                self._propose(place, limit, most, "distance", told)
        if config.max_age is not None and len(told) < most:
            limit = self._too_old(now - config.max_age, time_of)
            for place in (self.waiting, self.delayed):
                self._propose(place, limit, most, "max_age", told)
            while self.next < limit and len(told) < most:  # never delivered
                self._note(self.next, FRESH, "max_age", told)
                self.next += 1
        return told

    def buried(self, offset: int, now: int) -> bool:
        """The letter is written: the group has finished with that message. False: it was not proposed."""
        self.look_at_clock(now)
        if self.proposed.pop(offset, None) is None:
            return False
        self.settle(offset, offset + 1)
        return True

    def kept(self, offset: int, now: int) -> bool:
        """The letter could not be written: its message stands as before. False: it was not proposed."""
        self.look_at_clock(now)
        proposal = self.proposed.pop(offset, None)
        if proposal is None:
            return False
        self.place(offset, offset + 1, proposal.standing)
        return True

    def _propose(
        self, place: Ranges[Standing], limit: int, most: int, rule: Rule, told: list[Bury]
    ) -> None:
        while len(told) < most and (piece := place.pop(most - len(told), limit)) is not None:
            first, end, standing = piece
            for offset in range(first, end):
                self._note(offset, standing, rule, told)

    def _note(self, offset: int, standing: Standing, rule: Rule, told: list[Bury]) -> None:
        self.proposed[offset] = Proposal(standing, rule)
        told.append(Bury(offset, standing.count, standing.reason, rule))

    def _too_old(self, before: int, time_of: TimeOf) -> int:
        """Below this offset everything that nobody has was stored before that time."""
        firsts = [place.first for place in (self.waiting, self.delayed)]
        if self.next < self.end:
            firsts.append(self.next)
        low = min((first for first in firsts if first is not None), default=self.end)
        if low >= self.end or time_of(low) >= before:
            return low
        high = self.end
        while high - low > 1:  # low is too old, high is not, or the end
            middle = (low + high) // 2
            if time_of(middle) < before:
                low = middle
            else:
                high = middle
        return high
