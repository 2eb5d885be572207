"""Dead letters: messages that a group gives up, so that they cannot stop it for ever.

Rules:

1. A letter is a message whose processing fails. A message that no member has, and of which at least one delivery failed
   (it was nacked, or its member died or kept it too long; `group.py`, rule 3), becomes a letter by one of the settings
   - `max_deliveries`: when so many deliveries have failed. It is not delivered again, and does not wait for the delay
     of its last nack.
   - `distance`: when more than `distance` deliveries have failed; or when the highest acked offset since the group
     began is more than `distance` ahead of the message, delayed or not. After a seek nothing counts as acked. Each
     failure is a step in which the group did not get past the message, so no message holds a group for ever: neither in
     an exclusive group nor with one consumer of credit 1, where nothing later is acked.
   - `max_age`: when the first failed delivery was made that long ago, plus up to a 64th of it, so that messages share
     their times.
   The first rule in this order that applies is reported. A message that was taken back without a failure (its member
   left, its node ended) is delivered again, however far the group is ahead of it by then: no program may have seen it.
2. **Death comes before delivery.** `take` and `letters` look for messages that a rule gives up before they do anything
   else, so a returned message is never delivered once more just because delivery was faster. A message that a member
   has is not examined until it comes back.
3. The letter is written before the group moves on. `letters` proposes each letter once; a proposed message is not
   delivered. `buried` settles it. `kept` says that the letter could not be written: the message has the same standing
   as before, and if a rule still applies, the next call of `letters` proposes it again. So a driver that cannot write
   dead letters waits before it calls `letters` again.
4. An answer to a letter that is not, or no longer, proposed (because of a seek or a trim) changes nothing.
5. Proposals do not survive a restart: they are made again, and the dead letters are deduplicated, so each is stored
   once. Counts, failures and times of first deliveries survive as far as the log of the group does; messages whose
   state the log lost count, and age, from their next delivery on.
6. **Redrive.** `redrive` delivers a message again that the group has given up: under its own offset, and to this group
   only. It counts, ages and falls behind anew from then on. The letter records how often its message had been redriven
   before it died, and the group knows how often each message was: a letter is redriven once, whatever was lost in
   between. A message that the group has not finished with is not redriven: it will be delivered, or die, anyway.
   Messages above it that a member of an exclusive group has are recalled, so that all come in order. The epoch rises,
   so that no ack of an earlier delivery counts.
7. A clock that goes back makes no message older, and no message lives longer than `max_age` from then on; a clock that
   leaps ahead makes messages old early.
"""

from __future__ import annotations

from railgun.broker.protocol.groups.messages import FRESH, Bury, RedriveOutcome, Standing
from railgun.broker.protocol.groups.parts import UNBOUNDED, Proposal
from railgun.broker.protocol.groups.persisted import Mark, Redriven, unsettle
from railgun.broker.protocol.groups.ranges import Ranges
from railgun.broker.protocol.groups.state import State


class DeadLetters(State):
    """The part of a group that applies the dead-letter rules."""

    __slots__ = ()

    def letters(self, now: int, most: int = 1000) -> list[Bury]:
        """Propose up to `most` new dead letters, the lowest offsets first."""
        self.look_at_clock(now)
        self.apply_dead_letter_rules(now)
        proposals: list[Bury] = []
        while (
            len(proposals) < most
            and (piece := self.dead.pop(most - len(proposals), UNBOUNDED)) is not None
        ):
            first, end, proposal = piece
            standing, rule = proposal
            for offset in range(first, end):
                self.proposed[offset] = proposal
                redrives = self.redrives(offset)
                proposals.append(Bury(offset, standing.count, standing.reason, rule, redrives))
        return proposals

    def apply_dead_letter_rules(self, now: int) -> None:
        """Move messages that a rule gives up from `waiting` and `delayed` to `dead`: rule 2.

        The rules that count deliveries are not applied here: they depend on the message alone, and are applied when a
        message comes back (`State.place`).
        """
        if self.config.distance is not None:
            limit = self.highest - self.config.distance
            for place in (self.waiting, self.delayed):
                self._give_up_below(place, limit)
        if now >= self.old_at:
            for place in (self.waiting, self.delayed):
                self._give_up_old(place, now)
            self.old_at = min(self._age_deadlines(), default=UNBOUNDED)

    def _give_up_below(self, place: Ranges[Standing], limit: int) -> None:
        spared: list[tuple[int, int, Standing]] = []  # never failed, or redriven recently
        while (piece := place.pop(UNBOUNDED, limit)) is not None:
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
        """Settle a message whose letter is written. Return False if it was not proposed."""
        self.look_at_clock(now)
        if self.proposed.pop(offset, None) is None:
            return False
        self.settle(offset, offset + 1)
        return True

    def kept(self, offset: int, now: int) -> bool:
        """Put a message back whose letter could not be written. Return False if it was not proposed."""
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

    def redrive_message(self, offset: int, redrives: int) -> RedriveOutcome:
        """Deliver a message again that was given up: rule 6. Return the outcome."""
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
        self.resets.append(Redriven(offset, end, redrives + 1, self.highest, again=True))
        return "redriven"
