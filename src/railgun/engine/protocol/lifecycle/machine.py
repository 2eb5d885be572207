"""State machine of a flow's life: start, run, rescale, save, stop, and recover when a worker is lost.

One machine for a job; the controller drives it. It decides when processes are launched, when a generation of the flow
starts, when a rescale may begin, when a snapshot is taken, and when the flow is over. Its rules:

1. **Generations.** All workers of a flow start together, in a generation. Any failure ends the generation: all work
   under way is given up, and the next generation starts from the last snapshot or, without one, from the sources.
   Messages of an older generation are dropped.
2. **Processes** are launched and turned away by the rules of `worker_processes`; snapshots follow `snapshot_rounds`.
3. **Launch first.** A rescale begins when its new workers are up: waiting for a cluster to find room for them
   delays nothing. Of several requests that wait, the last one wins.
4. **Rescales and the end** do not meet: a flow whose sources have ended ends when no rescale is under way.
5. **Failures** that would come again (a user's function that raises) stop the flow. Other failures restart it, each
   restart a little later than the one before; after more than `restarts` of them within `window` the flow has failed,
   with the last cause. All workers lost of one generation are one failure: a worker that was there when the generation
   failed, and is lost before it is ready for the next, is reported and launched again, but not counted. A restart
   ends the rescale under way, and the event `not-rescaled` says so, though the next generation has the requested
   size: keys did not move live.
6. **New workers that are lost** before they join do not touch the flow: they are launched again. When one of them is
   lost more than `restarts` times within `window`, the request is given up, and the workers launched for it leave.
7. **A stop** with snapshots is a last snapshot: the flow goes on from there when it is run again. Without them, or if
   it is to *drain*, sources end, and what was read is written. A flow that is stopped while it starts has its last
   snapshot already; if some output of that snapshot may not be visible yet, the flow starts nevertheless. If a stop
   cannot be completed (a worker is lost while the flow stops, or the flow is stopped while it starts again, and there
   are no snapshots), the flow has failed, and reports that.
8. **Before the start** nothing is launched: a flow that waits for its cluster can be rescaled, stopped and inspected.
9. **The end** of all sources is saved too, and the flow is over when all its output is visible.
10. **A leaving worker** closes its sources and sinks. If one of them cannot be closed, the flow has failed, even one
    that had finished: everything is written, but somebody should look. While the flow goes on, an error that may pass
    is only reported, and so is any error of a worker that has not begun: it has written nothing. A worker that is
    ended while it loads the flow was to end anyway: nothing is reported.

Methods take an event and the time, and return orders, to be carried out in order.
"""

from __future__ import annotations

from collections.abc import Iterable

from railgun.engine.protocol.lifecycle.messages import (
    Address,
    Begin,
    Ended,
    EndSources,
    Failed,
    Farewell,
    Joined,
    Order,
    Published,
    Ready,
    Report,
    Saved,
    Start,
    StopSources,
    TakeSnapshot,
    Tell,
    WorkerReport,
)  # fmt: skip
from railgun.engine.protocol.lifecycle.snapshots import (
    FIRST_BACK_OFF_US,
    MAX_BACK_OFF_US,
    LifecycleError,
    Snapshots,
    State,
)
from railgun.engine.protocol.lifecycle.worker_processes import (
    HURRIED_LEAVE_TIMEOUT_US,
    LEAVE_TIMEOUT_US,
    SECOND_US,
    Member,
    StaleWorkerError,
)
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import coordinator as c

__all__ = [
    "FAILURE_GRACE_US",
    "HURRIED_LEAVE_TIMEOUT_US",
    "LEAVE_TIMEOUT_US",
    "Lifecycle",
    "LifecycleError",
    "Member",
    "StaleWorkerError",
]

FAILURE_GRACE_US = SECOND_US // 2


class Lifecycle(Snapshots):
    """The state machine of one flow's life."""

    # ------------------------------------------------------------ events

    def start(self, now: int) -> list[Order]:
        """Allow workers to be launched, for the placement last requested meanwhile, if any."""
        self.started = True
        if self.wanted is not None:
            self.placement, self.wanted = self.wanted, None
        return self._orders(now)

    def expects(self, worker: Worker, incarnation: int) -> bool:
        """Return whether this process is expected."""
        return self.processes.expects(worker, incarnation)

    def up(self, worker: Worker, incarnation: int, address: Address, now: int) -> list[Order]:
        """Take note that a worker's process is up; raise `StaleWorkerError` if it is not expected."""
        self.processes.up(worker, incarnation, address)
        return self._orders(now)

    def cannot_load(self, worker: Worker, why: str, now: int) -> list[Order]:
        """Take note that an expected worker cannot load the flow: no flow can run there."""
        end = self._fail if self.coordinator is None else self._give_up_rescale
        end(f"worker {worker}: {why}")
        return self._orders(now)

    def down(self, worker: Worker, incarnation: int, why: str, now: int) -> list[Order]:
        """Take note that a worker's process has ended or cannot be reached any more."""
        member = self.members.get(worker)
        if member is None or member.incarnation != incarnation:
            return []
        del self.members[worker]
        if member.leaving and member.owes_farewell and not self.over:
            self._restart(f"worker {worker} left, and what was to be saved of it is lost", now)
        elif not member.leaving and not self.over:
            lost = f"worker {worker} is lost: {why}"
            if member.of_failed_generation:
                self._lost_with_generation(worker, why)
            elif self.coordinator is not None and worker not in self.coordinator.members:
                self._lost_before_joining(worker, lost, now)
            else:
                self._restart(lost, now)
        return self._orders(now)

    def lost_leaving(self, worker: Worker, why: str, now: int) -> list[Order]:
        """Take note that a leaving worker died inside user code, closing a source or a sink (rule 10)."""
        member = self.members[worker]
        if member.leaving and member.address is not None:
            self._failed_leaving(worker, Failed(self.generation, why, final=False))
        return self._orders(now)

    def reported(self, worker: Worker, report: WorkerReport, now: int) -> list[Order]:
        """Take a worker's report; drop it if it is of another generation."""
        member = self.members.get(worker)
        if member is None or report.generation != self.generation:
            return []
        if isinstance(report, Farewell) and member.leaving:
            if report.error and member.owes_farewell:
                self._restart(f"worker {worker} leaves, and cannot save: {report.error}", now)
            member.owes_farewell = False
            return self._orders(now)
        if member.leaving or self.over:
            # Errors of links are to be expected from a worker that leaves.
            if isinstance(report, Failed) and (report.final or report.step):
                self._failed_leaving(worker, report)
            return self._orders(now)
        match report:
            case Ready():
                member.ready, member.of_failed_generation = True, False
                if self.coordinator is not None:
                    self._carry_out(self.coordinator.joined(worker))
            case Joined():
                assert self.coordinator is not None
                self._carry_out(self.coordinator.joined(worker))
            case Report(_, stage, distributor_report):
                assert self.coordinator is not None
                self._carry_out(self.coordinator.reported(worker, stage, distributor_report))
            case Ended():
                member.ended = True
            case Saved():
                self._saved(worker, report)
            case Published(_, snapshot):
                if snapshot == self.saving.committed:
                    self.saving.unpublished.discard(worker)
            case Failed(_, error, final, step):
                if final:
                    self.failed_step = step
                    self._fail(f"worker {worker}: {error}")
                elif self._pending_failure is None:
                    self._pending_failure = (now, f"worker {worker}: {error}")
        return self._orders(now)

    def scale(self, placement: Placement, now: int) -> list[Order]:
        """Request this placement, in place of a request that has not begun.

        Raise `LifecycleError` if the flow is over or stopping.
        """
        if self.over or self._stopping:
            state = self.state_text if self.over else "stopping"
            raise LifecycleError(f"the flow is {state}: it cannot be rescaled")
        self.wanted = placement
        self._lost_joining = {}
        return self._orders(now)

    def stop(self, now: int, *, drain: bool = False) -> list[Order]:
        """End the flow: with a last snapshot or, if it is to `drain` or takes no snapshots, with its sources."""
        if not self.over and not self._stopping:
            self.wanted = None
            self._drain = drain or not self.saving.on
            goes_on = self.coordinator is not None or (self.saving.on and self._drain)
            goes_on = goes_on or self.saving.open
            if not goes_on:
                self.how = f"it has not begun{' again' * self._has_run}"
            elif self._drain:
                self.how = "sources end, what is under way is finished"
            else:
                self.how = "a last snapshot"
            self._happened("stopping", f"stopping: {self.how}")
            if goes_on:
                self._stopping = True
                self.state = "stopping"
            elif self.failed_times and self._has_run and not self.saving.on:
                self._fail(
                    "stopped while it was to start again: what it had read is not all written"
                )
            else:
                self._happened("finished", self._where("stopped before it began"))
                self._end("finished")
        return self._orders(now)

    def abort(self, why: str, now: int) -> list[Order]:
        """End the flow at once, as failed."""
        self.processes.hurried = True
        if not self.over:
            self._fail(why)
        return self._orders(now)

    def tick(self, now: int) -> list[Order]:
        """Take note that time has passed."""
        return self._orders(now)

    # ------------------------------------------------------------ state for people

    @property
    def gone(self) -> bool:
        """Return whether the flow is over and no process is left."""
        return self.over and not self.members

    @property
    def shown(self) -> State:
        """Return the state to show to people: "rescaling" while a running flow rescales."""
        busy = self.coordinator is not None and self.coordinator.phase != "idle"
        return "rescaling" if self.state == "running" and (busy or self.wanted) else self.state

    # ------------------------------------------------------------ steps

    def _orders(self, now: int) -> list[Order]:
        while self._advance(now):
            pass
        self.processes.cancel_overdue(now)
        out, self._out = self._out, []
        return out

    def _advance(self, now: int) -> bool:
        """Take the next step that is possible; return False if there is none."""
        if self.over or not self.started:
            return False
        if self._pending_failure is not None and now - self._pending_failure[0] >= FAILURE_GRACE_US:
            self._restart(self._pending_failure[1], now)
            return True
        if self.coordinator is None:
            return self._begin_generation(now)
        if self._advance_snapshot(now):
            return True
        if self.coordinator.phase != "idle":
            return self._next_snapshot(now)
        if self._stopping and not self._drain:
            return self._last_snapshot(now)
        if self._stopping and not self._draining:
            self._draining = True
            self._tell_all(StopSources(self.generation))
            return True
        if all(self.members[worker].ended for worker in self.coordinator.members):
            if self.saving.on:
                return self._last_snapshot(now)
            self._happened("finished", "all sources have ended, and everything is written")
            self._end("finished")
            return True
        if self._next_snapshot(now):
            return True
        return self.wanted is not None and self._try_scale(self.wanted, now)

    def _begin_generation(self, now: int) -> bool:
        """Order the workers to start once all are up, and to begin once all are ready."""
        if now < self._not_before or self.saving.phase == "writing":
            return False
        for worker in self.placement.workers:
            if worker not in self.members:
                self.processes.launch(worker, now)
        if any(map(self.processes.is_unusable, self.placement.workers)):
            return False
        if all(self.members[worker].ready for worker in self.placement.workers):
            self.coordinator = c.Coordinator(self.placement, self.stages)
            self.state = "stopping" if self._stopping else "running"
            self._has_run = True
            self.saving.begin_generation(now)
            for worker in self.placement.workers:
                self._begin(worker)
            size = len(self.placement.workers)
            self._happened("running", self._where(f"running on {size} worker{'s' * (size != 1)}"))
            return True
        if self._starting:
            return False
        self._starting = True
        self.generation += 1
        for worker in self.placement.workers:
            below = [lower for lower in self.placement.workers if lower < worker]
            self._start_worker(worker, self.placement.workers, below)
        return True

    def _start_worker(
        self, worker: Worker, members: tuple[Worker, ...], dial: Iterable[Worker]
    ) -> None:
        epochs = (0,) * self.stages if self.coordinator is None else tuple(self.coordinator.epochs)
        addresses = tuple((peer, self.processes.address(peer)) for peer in dial)
        snapshot, recover = None, False
        if self.coordinator is None:
            snapshot = self.saving.committed
            recover = self.saving.on and worker == min(members)
        order = Start(
            self.generation, self.placement, members, epochs, addresses, snapshot, recover
        )
        self._to(worker, order)

    def _begin(self, worker: Worker) -> None:
        member = self.members[worker]
        member.owes_farewell, member.begun = self.saving.on, True
        self._to(worker, Begin(self.generation, self.saving.number))

    # ------------------------------------------------------------ rescaling

    def _try_scale(self, wanted: Placement, now: int) -> bool:
        """Launch the missing workers; once all are up, begin the rescale."""
        assert self.coordinator is not None
        for worker in [w for w in self.members if w not in self.coordinator.members]:
            if worker not in wanted.workers:
                self.processes.dismiss(worker)
        missing = [worker for worker in wanted.workers if worker not in self.members]
        for worker in missing:
            self.processes.launch(worker, now)
        # The coordinator would wait for the snapshot too, but not notice a worker lost meanwhile.
        if self.coordinator.saving or any(map(self.processes.is_unusable, wanted.workers)):
            return False
        self.wanted = None
        self._lost_joining = {}
        size = len(wanted.workers)
        self._happened("rescaling", f"rescaling to {size} worker{'s' * (size != 1)}")
        self._carry_out(self.coordinator.rescale(wanted))
        return True

    def _carry_out(self, orders: Iterable[c.Order]) -> None:
        """Carry out the coordinator's orders."""
        for order in orders:
            match order:
                case c.Launch(workers, members):
                    for worker in workers:
                        dial = [w for w in members if w not in workers or w < worker]
                        self._start_worker(worker, members, dial)
                case c.Begin(worker):
                    self._begin(worker)
                case c.TakeSnapshot(worker, snapshot):
                    self.saving.phase = "saving"
                    self._to(worker, TakeSnapshot(self.generation, snapshot, self.saving.full))
                case c.Commit():
                    self.saving.phase = "whole"
                case c.Tell(worker, stage, event):
                    self._to(worker, Tell(self.generation, stage, event))
                case c.EndSources(worker):
                    self._to(worker, EndSources(self.generation))
                case c.Stop(worker):
                    self.processes.dismiss(worker)
                case c.Rescaled(placement):
                    self.placement = placement
                    size = len(placement.workers)
                    self._happened("rescaled", f"runs on {size} worker{'s' * (size != 1)} now")
                case _:
                    raise LifecycleError(f"nobody asked for {order}")

    # ------------------------------------------------------------ failure and end

    def _restart(self, why: str, now: int) -> None:
        self.failures = [at for at in self.failures if now - at < self.window] + [now]
        self.failed_times += 1
        if self._stopping and not self.saving.on:
            self._fail(f"{why}; the flow was stopping, and has not written all of its results")
            return
        if len(self.failures) > self.restarts:
            self._fail(f"{why} (failure {len(self.failures)} within {self.window // SECOND_US} s)")
            return
        if self.coordinator is not None and self.coordinator.target is not None:
            self.placement = self.coordinator.target
            size = len(self.placement.workers)
            on = f"{size} worker{'s' * (size != 1)}"
            self._happened(
                "not-rescaled",
                f"{why}; the rescale to {on} was interrupted, and the flow starts again, on {on}",
            )
        was_begun = self.coordinator is not None
        self.coordinator = None
        self._draining = False
        self._abandon(why)
        if len(self.failures) > 1:
            self._not_before = now + min(
                FIRST_BACK_OFF_US << (len(self.failures) - 2), MAX_BACK_OFF_US
            )
        self._next_generation()
        for worker in list(self.members):
            member = self.members[worker]
            member.ended = member.owes_farewell = False
            member.of_failed_generation = True
            if worker not in self.placement.workers:
                self.processes.dismiss(worker)
        self.state = "starting"
        at = self.saving.committed
        back = "starts again from its sources" if at is None else f"goes back to snapshot {at}"
        again = f"the flow {back}" if was_begun else "trying again"
        self._happened("restarting", f"{why}; {again}")

    def _next_generation(self) -> None:
        """Order all workers to start once more; reports of the previous generation are stale from now on."""
        self._pending_failure = None
        self._starting = False
        self.generation += 1
        for member in self.members.values():
            member.ready = False
            member.begun = member.begun and member.leaving

    def _lost_with_generation(self, worker: Worker, why: str) -> None:
        """Report another lost worker of the generation that failed: the flow goes back already (rule 5)."""
        if self._starting:
            self._next_generation()
        self._happened("trouble", f"worker {worker} is lost too: {why}")

    def _lost_before_joining(self, worker: Worker, why: str, now: int) -> None:
        """Count a worker lost before it joined; the flow itself is not touched (rule 6)."""
        lost = [at for at in self._lost_joining.get(worker, []) if now - at < self.window]
        self._lost_joining[worker] = [*lost, now]
        if self.wanted is not None and len(self._lost_joining[worker]) > self.restarts:
            self._give_up_rescale(why)

    def _give_up_rescale(self, why: str) -> None:
        """Give up the waiting rescale, and dismiss the workers launched for it."""
        self.wanted = None
        self._happened("not-rescaled", f"{why}; the flow stays as it is")
        assert self.coordinator is not None
        for worker in [w for w in self.members if w not in self.coordinator.members]:
            self.processes.dismiss(worker)

    def _failed_leaving(self, worker: Worker, report: Failed) -> None:
        """Handle an error of a leaving worker that could not close its sources and sinks (rule 10)."""
        why = f"worker {worker}, on its way out: {report.error}"
        if not self.members[worker].begun:
            self._happened("trouble", why)
        elif self.state == "finished":
            self.failed_step = report.step
            self._fail(f"everything is written, but {why}")
        elif report.final and not self.over:
            self.failed_step = report.step
            self._fail(why)
        else:
            self._happened("trouble", why)

    def _fail(self, why: str) -> None:
        self.cause = why
        self._happened("failed", why)
        self._end("failed")

    def _end(self, state: State) -> None:
        self.state = state
        self.wanted = None
        self._abandon(self.cause)
        for worker in list(self.members):
            self.members[worker].owes_farewell = False
            self.processes.dismiss(worker)
