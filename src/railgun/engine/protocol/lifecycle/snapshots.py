"""Take snapshots in the `Lifecycle` machine, by the rules of `snapshot_rounds`; and hold the state its parts share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from railgun.engine.protocol.lifecycle.messages import (
    GiveUp,
    Happened,
    Order,
    Record,
    Saved,
    Settled,
    To,
    WorkerOrder,
    Write,
)
from railgun.engine.protocol.lifecycle.snapshot_rounds import LAST_SNAPSHOT_TRIES, SnapshotRounds
from railgun.engine.protocol.lifecycle.worker_processes import SECOND_US, WorkerProcesses
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import coordinator as c
from railgun.engine.protocol.rescale import messages as m
from railgun.errors import RailgunError

State = Literal["starting", "running", "rescaling", "stopping", "finished", "failed"]
FIRST_BACK_OFF_US = SECOND_US // 2  # pause before the second restart; doubled each time
MAX_BACK_OFF_US = 16 * SECOND_US  # longest pause before a restart


class LifecycleError(RailgunError):
    """The flow cannot do that in its current state."""


class Snapshots:
    """The state of the machine, and the part that takes snapshots."""

    def __init__(
        self,
        stages: int,
        placement: Placement,
        *,
        restarts: int = 5,
        window: int = 300 * SECOND_US,
        saving: SnapshotRounds | None = None,
        generation: int = 0,
    ) -> None:
        self.stages = stages
        self.placement = placement
        self.restarts = restarts
        self.window = window
        self.saving = saving or SnapshotRounds(None)
        self.state: State = "starting"
        self.started = False  # whether workers may be launched
        self.generation = generation
        self.processes = WorkerProcesses(self._give)
        self.members = self.processes.members
        self.coordinator: c.Coordinator | None = None  # set once all workers are ready
        self.wanted: Placement | None = None  # the requested placement, until its rescale begins
        self.cause = ""  # why the flow failed
        self.failed_step = ""
        self.failures: list[int] = []  # times within the window
        self.failed_times = 0  # failures in total
        self._lost_joining: dict[Worker, list[int]] = {}  # times within the window
        self.how = ""  # how the flow stops, for people
        self._has_run = False
        self._starting = False  # whether this generation's workers have been ordered to start
        self._draining = False  # whether sources have been ordered to stop
        self._drain = True  # whether a stop lets sources end
        self._stopping = False
        self._not_before = 0  # when the next generation may begin
        # Time and reason of a failure to act on after `FAILURE_GRACE_US`.
        self._pending_failure: tuple[int, str] | None = None
        self._out: list[Order] = []

    @property
    def over(self) -> bool:
        """Return whether nothing more will happen but the end of processes."""
        return self.state in ("finished", "failed")

    # ------------------------------------------------------------ defined by the other parts

    def _orders(self, now: int) -> list[Order]:
        raise NotImplementedError

    def _carry_out(self, orders: Iterable[c.Order]) -> None:
        raise NotImplementedError

    def _fail(self, why: str) -> None:
        raise NotImplementedError

    def _end(self, state: State) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------ events

    @property
    def state_text(self) -> str:
        """Return the state, with the cause if the flow has failed, to stand within a sentence."""
        cause = self.cause.strip().splitlines()
        return f"{self.state} ({cause[0]})" if cause else self.state

    def snapshot(self, now: int) -> list[Order]:
        """Request a snapshot; raise `LifecycleError` if the flow takes none or is over."""
        if not self.saving.on:
            raise LifecycleError(
                "the flow takes no snapshots: it was started without a place for them"
            )
        if self.over:
            raise LifecycleError(
                f"the flow is {self.state_text}: there is nothing to save any more"
            )
        self.saving.requests += 1
        return self._orders(now)

    def recorded(self, snapshot: int, error: str, now: int) -> list[Order]:
        """Take note that the store has written down that a snapshot begins, or that it cannot (`error`)."""
        saving = self.saving
        if saving.number == snapshot and saving.phase == "recording":
            if error:
                self._snapshot_failed(error, now)
            else:
                assert self.coordinator is not None
                saving.phase = "waiting"
                self._carry_out(self.coordinator.want_snapshot(snapshot, settles=True))
        return self._orders(now)

    def written(self, snapshot: int, error: str, now: int) -> list[Order]:
        """Take note that the store has written a manifest (the commit), or that it cannot (`error`)."""
        saving = self.saving
        if saving.number != snapshot or saving.phase != "writing":
            return self._orders(now)
        if error:
            self._snapshot_failed(error, now)
            return self._orders(now)
        running = None if self.over else self.coordinator
        members = self.placement.workers if running is None else running.members
        saving.commit(now, members)
        kind = "full" if saving.full else "of what changed"
        self._happened("snapshot", f"snapshot {snapshot} ({kind}) is committed")
        if running is not None:
            self._settle(snapshot, committed=True)
            if saving.last:
                saving.phase = "publishing"
        return self._orders(now)

    # ------------------------------------------------------------ steps

    def _advance_snapshot(self, now: int) -> bool:
        """Take the next step of the snapshot under way; return False if there is none."""
        saving = self.saving
        if saving.phase == "whole":
            if saving.failure_reason:
                self._snapshot_failed(saving.failure_reason, now)
                return True
            if not any(member.leaving and member.owes_farewell for member in self.members.values()):
                saving.phase = "writing"
                self._give(Write(saving.number, saving.last and self._drain))
                return True
        if saving.phase == "publishing" and not saving.unpublished:
            saving.phase = "none"
            ended = "all sources have ended" if self._drain else "stopped"
            self._happened("finished", f"{ended}; everything is saved, in snapshot {saving.number}")
            self._end("finished")
            return True
        return False

    def _next_snapshot(self, now: int) -> bool:
        """Begin a snapshot if one is due and return whether it began; a stopping flow takes only its last."""
        if self._stopping or not self.saving.is_due(now):
            return False
        self.saving.began = now
        self._begin_snapshot("asked for" if self.saving.requests else "it was time", last=False)
        return True

    def _begin_snapshot(self, why: str, *, last: bool) -> None:
        self.saving.begin(why, last=last)
        self._give(Record(self.saving.number, self.saving.full, why))

    def _last_snapshot(self, now: int) -> bool:
        """Begin the last snapshot, or try it again after a failure; return whether it began."""
        saving = self.saving
        if saving.busy or (saving.tries and now < self._not_before):
            return False
        self._begin_snapshot("the last one", last=True)
        return True

    def _saved(self, worker: Worker, report: Saved) -> None:
        saving = self.saving
        if report.snapshot != saving.number or saving.phase != "saving":
            return
        assert self.coordinator is not None
        if worker not in self.coordinator.saving:
            return
        if report.error:
            saving.failure_reason = saving.failure_reason or f"worker {worker}: {report.error}"
        saving.saved_rows += report.rows
        saving.saved_keys += report.keys
        self._carry_out(self.coordinator.reported(worker, 0, m.Snapshot(report.snapshot)))

    def _snapshot_failed(self, why: str, now: int) -> None:
        saving = self.saving
        was_told = saving.phase != "recording"
        saving.end(now)
        self._give(GiveUp(saving.number, why))
        self._happened("snapshot-failed", f"snapshot {saving.number} is given up: {why}")
        if self.coordinator is None or self.over:
            return
        if was_told:
            self._settle(saving.number, committed=False)
        if saving.last:
            saving.tries += 1
            self._not_before = now + FIRST_BACK_OFF_US
            if saving.tries >= LAST_SNAPSHOT_TRIES:
                self._fail(f"the last snapshot cannot be saved: {why}")

    def _settle(self, snapshot: int, *, committed: bool) -> None:
        """Tell all workers whether the snapshot was committed; workers that took part may leave now."""
        assert self.coordinator is not None
        self._tell_all(Settled(self.generation, snapshot, committed))
        self._carry_out(self.coordinator.settled())

    def _abandon(self, why: str) -> None:
        """Give up the snapshot under way, unless it is being written: of that one, the store reports the outcome."""
        saving = self.saving
        if saving.phase == "writing":
            return
        if saving.phase not in ("none", "publishing"):
            self._give(GiveUp(saving.number, why))
            self._happened("snapshot-failed", f"snapshot {saving.number} is given up: {why}")
        saving.phase = "none"

    # ------------------------------------------------------------ shared by all parts

    def _where(self, text: str) -> str:
        at = self.saving.committed
        return text if at is None else f"{text}, from snapshot {at}"

    def _tell_all(self, order: WorkerOrder) -> None:
        if self.coordinator is not None:
            for worker in self.coordinator.members:
                self._to(worker, order)

    def _happened(self, kind: str, text: str) -> None:
        self._give(Happened(kind, text))

    def _to(self, worker: Worker, order: WorkerOrder) -> None:
        self._give(To(worker, order))

    def _give(self, order: Order) -> None:
        self._out.append(order)
