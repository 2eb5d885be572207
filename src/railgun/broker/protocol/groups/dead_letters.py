"""Dead letters: messages that a group gives up, so that it does not stumble over them for ever.

Rules:

1. A letter is a message that fails to be processed. A message that no member has, and of which at least one delivery
   failed (it was nacked, or its member died or kept it too long; `group.py`, rule 3), becomes one
   - `max_deliveries`: when so many deliveries have failed. It is not delivered again, and does not wait for the delay
     of its last nack.
   - `distance`: when more than `distance` deliveries have failed; or when the highest acked offset since the group
     began is more than `distance` ahead of it, be it delayed or not. After a seek nothing counts as acked. Each
     failure is a step of the group that did not get past the message, so no message holds a group for ever: neither
     in an exclusive group nor with one consumer of credit 1, where nothing later is acked.
   - `max_age`: when the first delivery that failed was made that long ago, and up to a 64th longer, so that messages
     share their times.
   The first rule in this order that fits is told. What was taken back without a failure (its member left, its node
   ended) is delivered again, however far the group is ahead of it by then: no program may have seen it.
2. **Death comes before delivery.** `take` and `letters` look for messages that a rule gives up before they do
   anything else, so a message that comes back is never delivered once more because delivery was quicker. What a
   member has is not looked at until it comes back.
3. The letter is written before the group moves on. `letters` proposes each once; while proposed it is delivered to
   nobody. `buried`: it is settled. `kept`: the letter could not be written, and the message stands as before; if a
   rule still fits, the next call of `letters` proposes it again. So a driver whose dead letters fail waits before
   it asks again.
4. An answer to a letter that is not proposed (any more: the group sought, or the stream was trimmed) changes
   nothing.
5. Proposals do not survive a restart: they are made again, and the dead letters see to it that each is there once.
   Counts, failures and times of first deliveries survive as far as the log of the group does; what the log lost
   counts, and ages, from its next delivery on.
6. **Redrive.** `redrive` lets the group get a message again that it has given up: under its own offset, and nobody
   else gets it. It counts, ages and falls behind anew from then on. The letter says how often its message was redriven
   before it died, and the group knows how often each was: a letter is redriven once, whatever was lost in between. A
   message that the group has not finished with is not redriven: it will come, or die, anyway. What a member of an
   exclusive group has above it is recalled, so that all come in order. Epochs rise, so that no ack of before counts.
7. A clock that goes back makes no message older than it is, and none live longer than `max_age` from then on; a
   clock that leaps ahead makes messages old early.
"""

from __future__ import annotations

from railgun.broker.protocol.groups.messages import FRESH, Bury, Redrove, Standing
from railgun.broker.protocol.groups.parts import FAR, Proposal
from railgun.broker.protocol.groups.persisted import Mark, Redriven, unsettle
from railgun.broker.protocol.groups.ranges import Ranges
from railgun.broker.protocol.groups.state import State


class Letters(State):
    """The part of a group that gives messages up."""

    __slots__ = ()

    def letters(self, now: int, most: int = 1000) -> list[Bury]:
        """Propose up to `most` new letters, the lowest offsets first."""
        self.look_at_clock(now)
        self.condemn(now)
        told: list[Bury] = []
        while len(told) < most and (piece := self.dead.pop(most - len(told), FAR)) is not None:
            first, end, proposal = piece
            standing, rule = proposal
            for offset in range(first, end):
                self.proposed[offset] = proposal
                redrives = self.redrives(offset)
                told.append(Bury(offset, standing.count, standing.reason, rule, redrives))
        return told

    def condemn(self, now: int) -> None:
        """Move what a rule gives up to `dead`, from where it would be delivered: rule 2.

        The rules that count deliveries are not here: they depend on nothing but the message, and are looked at when a
        message comes back (`State.place`).
        """
        if self.config.distance is not None:
            limit = self.highest - self.config.distance
            for place in (self.waiting, self.delayed):
                self._give_up_below(place, limit)
        if now >= self.old_at:
            for place in (self.waiting, self.delayed):
                self._give_up_old(place, now)
            self.old_at = min(self._ages(), default=FAR)

    def _give_up_below(self, place: Ranges[Standing], limit: int) -> None:
        spared: list[tuple[int, int, Standing]] = []  # never failed, or redriven not long ago
        while (piece := place.pop(FAR, limit)) is not None:
            first, end, standing = piece
            if not standing.failures:
                spared.append(piece)
                continue
            self.dead.set(first, end, Proposal(standing, "dead_distance"))
            for low, high, mark in self.redriven.pieces(first, end):
                if mark.highest >= limit:
                    self.dead.remove(low, high)
                    spared.append((low, high, standing))
        for first, end, standing in spared:
            place.set(first, end, standing)

    def _give_up_old(self, place: Ranges[Standing], now: int) -> None:
        for first, end, standing in list(place):
            if self.too_old_at(standing) <= now:
                place.remove(first, end)
                self.dead.set(first, end, Proposal(standing, "dead_age"))

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

    def redrives(self, offset: int) -> int:
        """Return how often a message was redriven."""
        mark = self.redriven.pieces(offset, offset + 1)
        return mark[0][2].number if mark else 0

    def take_back(self, offset: int, redrives: int) -> Redrove:
        """Let a message that was given up be delivered again: rule 6. Return what became of that."""
        if not self.first <= offset < self.end:
            return "gone"
        if self.redrives(offset) > redrives:
            return "already"
        if offset >= self.floor and not self.settled.pieces(offset, offset + 1):
            return "busy"
        end = offset + 1
        self.floor = unsettle(self.settled, self.floor, offset, end)
        self.waiting.set(offset, end, FRESH)
        self.unsaved.remove(offset, end)
        self.redriven.set(offset, end, Mark(redrives + 1, self.highest))
        self.voids.append(Redriven(offset, end, redrives + 1, self.highest, again=True))
        return "redriven"
