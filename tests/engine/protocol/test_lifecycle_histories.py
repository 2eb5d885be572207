"""The life of a flow under thousands of random fates; and that they would find a machine that is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from tests.engine.protocol.lifecycle_world import World, calm_end, wild_end

from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.lifecycle.machine import Lifecycle
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import coordinator as c
from railgun.errors import ProtocolError

BLOCK = 100


@pytest.mark.parametrize("block", range(10))
def test_whatever_happens_it_comes_to_rest_at_the_last_size_asked_for(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        _live(calm_end, seed)


@pytest.mark.parametrize("block", range(10))
def test_however_it_ends_it_comes_to_its_end(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        _live(wild_end, seed)


def _live(life: Any, seed: int) -> World:
    try:
        world: World = life(seed)
    except Exception as error:
        error.add_note(f"in {life.__name__}, seed {seed}")
        raise
    return world


def test_the_fates_know_every_moment() -> None:
    """What random worlds never come to, they say nothing about."""
    seen: Counter[str] = Counter()
    for seed in range(150):
        seen += _live(calm_end, seed).seen + _live(wild_end, seed).seen
    moments = ("recording", "waiting", "saving", "writing", "publishing, the last one")
    for moment in moments:
        assert seen[f"crash while {moment}"]
    for phase in ("idle", "moving", "leaving"):
        assert seen[f"cut while {phase}"]
    for state in ("running", "starting", "stopping"):
        assert seen[f"written while {state}"]
    kinds = ("joined", "rolled back", "the end is saved", "snapshot-failed", "late farewell")
    inside = ("ended as it loads", "ended before it begins", "lost as it leaves, finished")
    for kind in (*kinds, *inside, "lost too"):
        assert seen[kind], kind


# ---------------------------------------------------------------- machines that are wrong


class IgnoresOwing(Lifecycle):
    """Writes the manifest before all who left have handed over."""

    def _advance_snapshot(self, now: int) -> bool:
        owes_farewell = [
            member for member in self.members.values() if member.leaving and member.owes_farewell
        ]
        for member in owes_farewell:
            member.owes_farewell = False
        done = super()._advance_snapshot(now)
        for member in owes_farewell:
            member.owes_farewell = True
        return done


class LosesFarewells(Lifecycle):
    """Goes on when someone left without a farewell."""

    def down(self, worker: Worker, incarnation: int, why: str, now: int) -> list[o.Order]:
        member = self.members.get(worker)
        if member is not None and member.leaving:
            member.owes_farewell = False
        return super().down(worker, incarnation, why, now)


class LeavesEarly(Lifecycle):
    """Lets workers leave before it is known what became of a snapshot they took part in."""

    def _carry_out(self, orders: Iterable[c.Order]) -> None:
        super()._carry_out(orders)
        if self.coordinator is not None and self.coordinator.unsettled:
            self.coordinator.unsettled = False
            super()._carry_out(self.coordinator._orders())


class DoesNotWait(Lifecycle):
    """Starts a generation while the manifest is being written."""

    def _begin_generation(self, now: int) -> bool:
        if self.saving.phase == "writing" and now >= self._not_before:
            self.saving.phase = "none"
        return super()._begin_generation(now)


class UsesNumbersAgain(Lifecycle):
    """Counts only what was committed."""

    def _begin_snapshot(self, why: str, *, last: bool) -> None:
        self.saving.number = self.saving.committed or 0
        super()._begin_snapshot(why, last=last)


class LoadsWhatIsNotCommitted(Lifecycle):
    """Goes back to the last snapshot that began."""

    def _start_worker(self, worker: Worker, members: Any, dial: Any) -> None:
        committed = self.saving.committed
        self.saving.committed = self.saving.number
        super()._start_worker(worker, members, dial)
        self.saving.committed = committed


class ForgetsHowFarItWas(Lifecycle):
    """Goes back to the snapshot it began with."""

    first: int | None = None

    def _start_worker(self, worker: Worker, members: Any, dial: Any) -> None:
        committed = self.saving.committed
        if self.generation <= 21 and not self._has_run:
            self.first = committed
        self.saving.committed = self.first
        super()._start_worker(worker, members, dial)
        self.saving.committed = committed


class NobodyRecovers(Lifecycle):
    """What a snapshot prepared, and nobody published, stays where it is."""

    def _to(self, worker: Worker, order: o.WorkerOrder) -> None:
        if isinstance(order, o.Start):
            order = o.Start(
                *(order.generation, order.placement, order.members, order.epochs, order.dial),
                order.snapshot,
            )
        super()._to(worker, order)


class CountsItTooEarly(Lifecycle):
    """Tells workers that a snapshot counts when it is whole."""

    def _advance_snapshot(self, now: int) -> bool:
        was = self.saving.phase
        done = super()._advance_snapshot(now)
        if was == "whole" and self.saving.phase == "writing":
            self._tell_all(o.Settled(self.generation, self.saving.number, True))
        return done


class IgnoresTrouble(Lifecycle):
    """Writes the manifest though a worker could not save its part."""

    def _advance_snapshot(self, now: int) -> bool:
        self.saving.failure_reason = ""
        return super()._advance_snapshot(now)


class DoesNotPublish(Lifecycle):
    """Is over when the last snapshot is committed."""

    def _advance_snapshot(self, now: int) -> bool:
        if self.saving.phase == "publishing":
            self.saving.unpublished = set()
        return super()._advance_snapshot(now)


class StopsTooSoon(Lifecycle):
    """When it is stopped while it starts again, it is over, whatever is not visible yet."""

    def stop(self, now: int, *, drain: bool = False) -> list[o.Order]:
        if self.coordinator is None:
            self.saving.unpublished = set()
        return super().stop(now, drain=drain)


class GoesOnAfterTheEnd(Lifecycle):
    """Does not notice that all is over."""

    def _abandon(self, why: str) -> None:
        if not self.over:
            super()._abandon(why)


class GivesUpInSilence(Lifecycle):
    """The snapshot under way is not given up with its generation."""

    def _abandon(self, why: str) -> None:
        if self.saving.phase != "writing":
            self.saving.phase = "none"


class HandsRescalesOverAtOnce(Lifecycle):
    """Lets the coordinator wait for the snapshot, which knows nothing of workers that are lost."""

    def _try_scale(self, wanted: Placement, now: int) -> bool:
        assert self.coordinator is not None
        saving, self.coordinator.saving = self.coordinator.saving, set()
        ready = all(
            worker in self.members and not self.processes.is_unusable(worker)
            for worker in wanted.workers
        )
        if saving and ready:
            self.coordinator.saving = saving
            self.wanted = None
            self._carry_out(self.coordinator.rescale(wanted))
            return True
        try:
            return super()._try_scale(wanted, now)
        finally:
            self.coordinator.saving = saving


class NeverTriesAgain(Lifecycle):
    """A last snapshot that fails leaves the flow as it is."""

    def _last_snapshot(self, now: int) -> bool:
        return not self.saving.tries and super()._last_snapshot(now)


class TakesOneAtAnyTime(Lifecycle):
    """Begins a snapshot while another is under way."""

    def _next_snapshot(self, now: int) -> bool:
        if self.saving.requests and self.saving.phase == "saving":
            self._begin_snapshot("asked for", last=False)
            return True
        return super()._next_snapshot(now)


class CountsEveryLoss(Lifecycle):
    """Every worker that is lost of a generation that failed is a failure of its own."""

    def _lost_with_generation(self, worker: Worker, why: str) -> None:
        self._restart(why, 0)


class WaitsForTheLost(Lifecycle):
    """Lets a generation go on that one who was lost of the one before was told to begin."""

    def _next_generation(self) -> None:
        if self.coordinator is None and self.state == "starting" and self._starting:
            return
        super()._next_generation()


class BlamesWhomItEnds(Lifecycle):
    """Takes it for a failure that a worker it has ended itself was loading the flow."""

    def lost_leaving(self, worker: Worker, why: str, now: int) -> list[o.Order]:
        self._failed_leaving(worker, o.Failed(self.generation, why, final=True))
        return self._orders(now)


class BlamesWhoHasNotBegun(Lifecycle):
    """Takes it for a failure that a worker which has written nothing cannot let go."""

    def _failed_leaving(self, worker: Worker, report: o.Failed) -> None:
        self.members[worker].begun = True
        super()._failed_leaving(worker, report)


MUTANTS: tuple[type[Lifecycle], ...] = (
    *(IgnoresOwing, LosesFarewells, LeavesEarly, DoesNotWait, UsesNumbersAgain),
    *(LoadsWhatIsNotCommitted, ForgetsHowFarItWas, NobodyRecovers, CountsItTooEarly),
    *(IgnoresTrouble, DoesNotPublish, StopsTooSoon, GoesOnAfterTheEnd, GivesUpInSilence),
    *(HandsRescalesOverAtOnce, NeverTriesAgain, TakesOneAtAnyTime),
    *(CountsEveryLoss, WaitsForTheLost, BlamesWhomItEnds, BlamesWhoHasNotBegun),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_machine_that_is_wrong_is_found(mutant: type[Lifecycle]) -> None:
    for seed in range(BLOCK * 10):
        for life in (wild_end, calm_end):
            try:
                life(seed, mutant)
            except (AssertionError, KeyError, ProtocolError):
                return
    pytest.fail("nobody notices")
