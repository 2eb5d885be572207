"""Mutants of `broker.protocol.groups`: one rule changed, which the histories of `model` must find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from railgun.broker.protocol.groups import (
    Change,
    Command,
    Deliver,
    DeliveryError,
    Group,
    Missed,
    Paused,
    Receipt,
    Redriven,
    RedriveOutcome,
    Stale,
    Unsettled,
)
from railgun.broker.protocol.groups.messages import Bury, Flight, Rule, Standing
from railgun.broker.protocol.groups.parts import UNBOUNDED, Party, Proposal
from railgun.broker.protocol.groups.persisted import Mark
from railgun.broker.protocol.groups.ranges import Ranges
from railgun.errors import ProtocolError
from verification.groups.model import STORIES, play
from verification.mutation import Verdict, registrar

HISTORIES = 1_600
"""How many seeded histories to check a mutant with."""
CAUGHT = (AssertionError, ProtocolError, DeliveryError, AttributeError, ValueError, KeyError)
Kind = TypeVar("Kind", bound=type[Group])

MUTANTS: dict[str, type[Group]] = {}
"""The mutants: the changed rule, and the machine that breaks it."""


def mutant(kind: Kind) -> Kind:
    """Register a mutant under the first line of its docstring."""
    return registrar(MUTANTS, lambda kind: kind)(kind)


def hunt(name: str, histories: int = HISTORIES) -> Verdict:
    """Check the mutant with all stories, then with seeded histories, until one fails."""
    for story in STORIES:
        try:
            story(MUTANTS[name])
        except CAUGHT as error:
            return name, story.__name__, str(error)
    for seed in range(histories):
        try:
            play(seed, MUTANTS[name])
        except CAUGHT as error:
            return name, f"seed {seed}", str(error)
    return name, "", ""


@mutant
class AnyDelivery(Group):
    """An ack counts whatever its delivery number."""

    def _claim(
        self, member: str, receipts: Sequence[Receipt], now: int, *, keep: bool = False
    ) -> Any:
        changed = [
            replace(receipt, delivery=flights[0][2].delivery) if flights else receipt
            for receipt in receipts
            for flights in [self.party(member).flights.pieces(receipt.first, receipt.end)]
        ]
        return super()._claim(member, changed, now, keep=keep)


@mutant
class AnyEpoch(Group):
    """An ack counts whatever its epoch."""

    def _claim(
        self, member: str, receipts: Sequence[Receipt], now: int, *, keep: bool = False
    ) -> Any:
        changed = [
            replace(receipt, epoch=flights[0][2].epoch) if flights else receipt
            for receipt in receipts
            for flights in [self.party(member).flights.pieces(receipt.first, receipt.end)]
        ]
        return super()._claim(member, changed, now, keep=keep)


@mutant
class EpochStays(Group):
    """A hand-over does not begin an epoch."""

    def _hand_over(self) -> list[Command]:
        epoch = self.epoch
        commands = super()._hand_over()
        self.epoch = epoch
        return commands


@mutant
class GracefulCounts(Group):
    """A graceful leave counts as a delivery."""

    def leave(self, member: str, graceful: bool, now: int) -> list[Command]:
        return super().leave(member, False, now)


@mutant
class DeadDoNotCount(Group):
    """The deliveries of a dead member do not count."""

    def leave(self, member: str, graceful: bool, now: int) -> list[Command]:
        return super().leave(member, True, now)


@mutant
class EndOfNodeFails(Group):
    """Deliveries in flight when a node ended count as failed."""

    def standing_without_failure(self, flight: Flight) -> Standing:
        return replace(super().standing_without_failure(flight), spared=flight.spared)


@mutant
class EndOfNodeIsNotCounted(Group):
    """Messages in flight when a node ended are delivered with the same delivery number again."""

    def standing_without_failure(self, flight: Flight) -> Standing:
        return replace(
            super().standing_without_failure(flight),
            count=flight.delivery - 1,
            spared=flight.spared,
        )


@mutant
class EndOfNodeAges(Group):
    """A delivery that ended with the node begins the age of a message."""

    def standing_without_failure(self, flight: Flight) -> Standing:
        return replace(super().standing_without_failure(flight), since=flight.since)


@mutant
class SentAwayFails(Group):
    """A member that is sent away counts as dead."""

    def send_away(self, member: str, now: int) -> list[Command]:
        return self.leave(member, False, now)


@mutant
class SentAwayDoesNotCount(Group):
    """A member that is sent away leaves gracefully: its deliveries do not count."""

    def send_away(self, member: str, now: int) -> list[Command]:
        return self.leave(member, True, now)


@mutant
class FailuresOfBefore(Group):
    """A failure turns all deliveries before it into failures."""

    def put_back(self, first: int, end: int, standing: Standing) -> None:
        failed = standing.reason and standing.spared < standing.count
        super().put_back(first, end, replace(standing, spared=0) if failed else standing)


@mutant
class SparedIsNotSaved(Group):
    """The log does not record which deliveries ended with a node."""

    def changes(self) -> list[Change]:
        return [
            replace(change, standing=replace(change.standing, spared=0))
            if isinstance(change, Unsettled)
            else change
            for change in super().changes()
        ]


@mutant
class DistanceOfTheUntried(Group):
    """A message that never failed dies of distance."""

    def _give_up_below(self, place: Ranges[Standing], limit: int) -> None:
        for first, end, standing in list(place.pieces(0, max(0, limit))):
            if not standing.failures and not self.redriven.pieces(first, end):
                place.remove(first, end)
                self.dead.set(first, end, Proposal(standing, "dead_distance"))
        super()._give_up_below(place, limit)


@mutant
class NobodyIsBlocked(Group):
    """An exclusive group continues while an offset is delayed."""

    def blocked(self) -> int:
        return 1 << 62


@mutant
class NothingIsRecalled(Group):
    """After a nack in an exclusive group, the member keeps the messages above it."""

    def _recall(self, party: Party, lowest: int) -> list[Command]:
        self.epoch += self.config.exclusive
        return []


@mutant
class OneTooMany(Group):
    """Members get one message more than they have credit for."""

    def _shares(self, ready: int) -> list[tuple[Party, int]]:
        shares = super()._shares(ready)
        spare = ready - sum(share for _, share in shares)
        return [(p, share + (spare > 0 and at == 0)) for at, (p, share) in enumerate(shares)]


@mutant
class FirstTakesAll(Group):
    """Shares are not levelled."""

    def _shares(self, ready: int) -> list[tuple[Party, int]]:
        shares = []
        for party, _ in super()._shares(ready):
            share = min(ready, party.free)
            ready -= share
            shares.append((party, share))
        return [(party, share) for party, share in shares if share]


@mutant
class DelayUsesCredit(Group):
    """A delayed message is not taken from its member's credit."""

    def _shares(self, ready: int) -> list[tuple[Party, int]]:
        held = self.delayed.total
        return [(p, min(n, max(1, p.free - held))) for p, n in super()._shares(ready)]


@mutant
class NewFirst(Group):
    """New messages come before redeliveries."""

    def _lowest(self, most: int, below: int) -> tuple[int, int, Standing]:
        if self.next < self.end and not self.config.exclusive:
            first, self.next = self.next, min(self.end, self.next + most)
            return first, self.next, Standing()
        return super()._lowest(most, below)


@mutant
class SilentTrim(Group):
    """Missed messages are skipped without being reported."""

    def trimmed(self, first: int, now: int) -> list[Command]:
        super().trimmed(first, now)
        return []


@mutant
class NobodyTold(Group):
    """Messages missed while the group had no member are reported to no member."""

    def join(self, member: str, now: int) -> list[Command]:
        self.unreported.clear()
        return super().join(member, now)


@mutant
class ClockOnlyForward(Group):
    """A clock that goes back is ignored."""

    def look_at_clock(self, now: int) -> None:
        self.last_time = now


@mutant
class SeekRemembersAcks(Group):
    """After a seek back, acks from before it still count for the distance."""

    def seek(self, offset: int, now: int, member: str | None = None) -> list[Command]:
        highest = self.highest
        commands = super().seek(offset, now, member)
        self.highest = min(highest, offset - 1)
        return commands


@mutant
class LettersTwice(Group):
    """A proposed dead letter is delivered, too."""

    def letters(self, now: int, most: int = 1000) -> list[Bury]:
        commands = super().letters(now, most)
        for offset, proposal in self.proposed.items():
            self.waiting.set(offset, offset + 1, proposal.standing)
        self.proposed.clear()
        return commands


@mutant
class KeptIsLost(Group):
    """A dead letter that could not be written is given up all the same."""

    def kept(self, offset: int, now: int) -> bool:
        return self.buried(offset, now)


@mutant
class BuriedCountsAsAcked(Group):
    """A dead letter moves the highest acked offset."""

    def buried(self, offset: int, now: int) -> bool:
        done = super().buried(offset, now)
        self.highest = max(self.highest, offset) if done else self.highest
        return done


@mutant
class DeliveriesAreNotSaved(Group):
    """The log does not record deliveries."""

    def hand_out(self, party: Party, first: int, end: int, was: Standing, now: int) -> Deliver:
        unsaved = self.unsaved.copy()
        commands = super().hand_out(party, first, end, was, now)
        self.unsaved = unsaved
        return commands


@mutant
class ProgressIsIgnored(Group):
    """`in_progress` does not extend anything."""

    def in_progress(self, member: str, receipts: Sequence[Receipt], now: int) -> list[Command]:
        return self._claim(member, receipts, now, keep=True)[2]


@mutant
class TimersForget(Group):
    """A message that was extended is taken back at its first deadline."""

    def _expire(self, party: Party, first: int, end: int, now: int) -> int:
        for low, high, flight in party.flights.pieces(first, end):
            party.flights.set(low, high, replace(flight, expires=now))
        return super()._expire(party, first, end, now)


@mutant
class DeathAfterDelivery(Group):
    """Dead letters are searched after delivery."""

    def take(self, now: int) -> list[Deliver]:
        apply_dead_letter_rules = self.apply_dead_letter_rules
        try:
            type(self).apply_dead_letter_rules = lambda self, now: None  # type: ignore[method-assign]
            commands = super().take(now)
        finally:
            del type(self).apply_dead_letter_rules
        apply_dead_letter_rules(now)
        return commands


@mutant
class FlightsNeverDie(Group):
    """In-flight messages are never dead: a message that comes back below the distance is delivered again."""

    def apply_dead_letter_rules(self, now: int) -> None:
        back = [piece for piece in self.waiting if piece[2].count]
        for first, end, _ in back:
            self.waiting.remove(first, end)
        super().apply_dead_letter_rules(now)
        for first, end, standing in back:
            self.waiting.set(first, end, standing)


@mutant
class DelayedNeverDie(Group):
    """Delayed messages are never dead."""

    def apply_dead_letter_rules(self, now: int) -> None:
        delayed = self.delayed
        self.delayed = type(delayed)()
        super().apply_dead_letter_rules(now)
        self.delayed = delayed


@mutant
class DistanceOfAcksOnly(Group):
    """A message that is delivered again and again does not die of distance while nothing later is acked."""

    def delivered_too_often(self, standing: Standing) -> Rule | None:
        rule = super().delivered_too_often(standing)
        return None if rule == "dead_distance" else rule


@mutant
class DistanceOfDeliveriesIsOneLess(Group):
    """A message dies of distance when it comes back after as many deliveries as the distance."""

    def delivered_too_often(self, standing: Standing) -> Rule | None:
        rule, distance = super().delivered_too_often(standing), self.config.distance
        return "dead_distance" if rule is None and distance and standing.count >= distance else rule


@mutant
class EveryDeliveryIsTheFirst(Group):
    """Age begins anew with each delivery."""

    def hand_out(self, party: Party, first: int, end: int, was: Standing, now: int) -> Deliver:
        return super().hand_out(party, first, end, replace(was, since=None), now)


@mutant
class UncountedDeliveriesAge(Group):
    """A delivery that does not count begins the age of a message."""

    def give_back(self, first: int, end: int, flight: Flight, reason: str | None) -> None:
        super().give_back(first, end, flight, reason)
        if reason is None:
            for low, high, standing in self.waiting.pieces(first, end):
                self.waiting.set(low, high, replace(standing, since=flight.since))


@mutant
class AgeIsNotSaved(Group):
    """The log does not record when a message was first delivered."""

    def changes(self) -> list[Change]:
        return [
            replace(change, standing=replace(change.standing, since=None))
            if isinstance(change, Unsettled)
            else change
            for change in super().changes()
        ]


@mutant
class NothingIsPaused(Group):
    """A nack that blocks the group delays only its own messages."""

    def nack(self, *args: Any, block: bool = False, **kwargs: Any) -> list[Command]:
        return super().nack(*args, **kwargs)


@mutant
class StaleNackBlocks(Group):
    """A nack of messages that were taken back blocks the group."""

    def nack(
        self,
        member: str,
        receipts: Sequence[Receipt],
        delay: int,
        reason: str,
        now: int,
        *,
        block: bool = False,
    ) -> list[Command]:
        commands = super().nack(member, receipts, delay, reason, now, block=block)
        if block:
            self.pause = max(self.pause, (now + delay, delay))
        return commands


@mutant
class PauseIsForgotten(Group):
    """The log does not record that a group is blocked."""

    def changes(self) -> list[Change]:
        return [change for change in super().changes() if not isinstance(change, Paused)]


@mutant
class SeekStaysBlocked(Group):
    """A seek does not end a block."""

    def seek(self, offset: int, now: int, member: str | None = None) -> list[Command]:
        pause = self.pause
        commands = super().seek(offset, now, member)
        self.pause = pause
        return commands


@mutant
class StaleTimerEndsDelay(Group):
    """A stale timer ends a newer delay."""

    def tick(self, now: int) -> list[Command]:
        for timer in self.timers:
            if timer.at <= now and not timer.member:
                for low, high, standing in self.delayed.pieces(timer.first, timer.end):
                    self.delayed.set(low, high, replace(standing, until=min(now, standing.until)))
        return super().tick(now)


@mutant
class RedrivenTwice(Group):
    """A dead letter is redriven once for each request."""

    def redrive_message(self, offset: int, redrives: int) -> RedriveOutcome:
        return super().redrive_message(offset, max(redrives, self.redrives(offset)))


@mutant
class RedriveKeepsEpoch(Group):
    """After a redrive, acks of earlier deliveries count."""

    def redrive(
        self, letters: Iterable[tuple[int, int]], now: int
    ) -> tuple[list[RedriveOutcome], list[Command]]:
        epoch = self.epoch
        commands = super().redrive(letters, now)
        self.epoch = epoch
        return commands


@mutant
class RedrivenAreFarBehind(Group):
    """A redriven message is as far behind as before, and dies at once."""

    def redrive_message(self, offset: int, redrives: int) -> RedriveOutcome:
        how = super().redrive_message(offset, redrives)
        if how == "redriven":
            self.redriven.set(offset, offset + 1, Mark(redrives + 1, -1))
        return how


@mutant
class RedriveIsNotSaved(Group):
    """The log does not record a redrive."""

    def changes(self) -> list[Change]:
        return [change for change in super().changes() if not isinstance(change, Redriven)]


@mutant
class DamageIsDelivered(Group):
    """Unreadable messages are delivered."""

    def blocked(self) -> int:
        readable, self.readable = self.readable, UNBOUNDED
        below = super().blocked()
        self.readable = readable
        return below


@mutant
class LaterDamageHidesEarlier(Group):
    """Damage that is found later, at higher offsets, makes the messages in between readable."""

    def unreadable(self, offset: int) -> None:
        self.readable = offset


@mutant
class DelayedHideDamage(Group):
    """Consumers hear of damage while messages before it are delayed."""

    def at_damage(self) -> bool:
        ready = self.ready_below(self.readable)
        return self.readable != UNBOUNDED and not ready


@mutant
class UnsentCounts(Group):
    """A delivery that could not be sent counts."""

    def unsent(self, member: str, receipts: Sequence[Receipt], now: int) -> list[Command]:
        commands = self.nack(member, receipts, 0, "", now)
        return [command for command in commands if not isinstance(command, Stale)]


@mutant
class UnsentKeepsEpoch(Group):
    """Messages that an exclusive group could not send are delivered again in the same epoch."""

    def unsent(self, member: str, receipts: Sequence[Receipt], now: int) -> list[Command]:
        epoch = self.epoch
        commands = super().unsent(member, receipts, now)
        self.epoch = epoch
        return commands


@mutant
class UnsentAreMissedInSilence(Group):
    """Messages that are gone when they come back unsent are not reported."""

    def unsent(self, member: str, receipts: Sequence[Receipt], now: int) -> list[Command]:
        commands = super().unsent(member, receipts, now)
        return [command for command in commands if not isinstance(command, Missed)]


@mutant
class UnsentOutOfOrder(Group):
    """A member of an exclusive group keeps the messages above one that could not be sent."""

    def unsent(self, member: str, receipts: Sequence[Receipt], now: int) -> list[Command]:
        _, claims, _ = self._claim(member, receipts, now)
        for first, end, flight in claims:
            self.give_back(first, end, flight, None)
        self.epoch += bool(claims) and self.config.exclusive
        return self._report_missed()
