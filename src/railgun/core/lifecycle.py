"""The life of a flow: starting, running, rescaling, stopping, and what happens when a worker is lost.

One machine for a job; the controller drives it. It decides who is launched, when a generation of the flow starts,
when a rescale may begin, and when all is over. Its rules:

1. **Generations.** All workers of a flow start together, in a generation. Whatever goes wrong ends it: all that is
   under way is given up, and the next generation starts (until there are snapshots: from the sources). What is of
   an older generation is dropped.
2. **Incarnations.** Every process that is launched has a number of its own. One that is not the latest of its worker
   is turned away, so a second attempt of a task, or one that was given up for dead, can do no harm.
3. **Launch first.** A rescale begins when its new workers are there: waiting for a cluster to find room for them
   holds up nothing. Of several requests that wait, the last one wins.
4. **Rescales and the end** do not meet: a flow that is through with its sources ends when no rescale is under way.
5. **Failures** that would come again (a user's function that raises) stop the flow. Others restart it; when there
   are more than `restarts` of them within `window`, the flow has failed, with the last cause.
6. **New workers that are lost** before they join do not touch the flow: they are launched again, and after more than
   `restarts` of them within `window` the request is given up, and who was launched for it is let go.
7. **A stop** promises that what was read is written. If that cannot be kept (a worker is lost while the flow stops, or
   it is stopped while it starts again), it has failed, and says so.
8. **Who is to leave** and does not within `LEAVE` is ended by force; after an abort, within `HASTE`.

Methods take what happened and the time, and return orders, to be carried out in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from railgun.core.errors import RailgunError
from railgun.core.orders import (
    Address,
    Begin,
    Cancel,
    Ended,
    EndSources,
    Failed,
    Happened,
    Joined,
    Launch,
    Order,
    Ready,
    Report,
    Start,
    Stop,
    StopSources,
    Tell,
    To,
    WorkerOrder,
    WorkerReport,
)  # fmt: skip
from railgun.core.placement import Placement, Worker
from railgun.core.rescale import coordinator as c

State = Literal["starting", "running", "rescaling", "stopping", "finished", "failed"]
SECOND = 1_000_000
GRACE = SECOND // 2
LEAVE = 10 * SECOND
HASTE = SECOND


class LifecycleError(RailgunError):
    """A flow in this state cannot do that."""


class StaleWorkerError(RailgunError):
    """A worker that nobody waits for."""


@dataclass(slots=True)
class Member:
    """A worker's process, as far as is known."""

    incarnation: int
    since: int
    address: Address | None = None  # known when it is up
    ready: bool = False
    ended: bool = False
    leaving: bool = False
    told: int | None = None  # when it was told to leave
    cancelled: bool = False


class Lifecycle:
    """The life of one flow."""

    def __init__(
        self, stages: int, placement: Placement, *, restarts: int = 5, window: int = 300 * SECOND
    ) -> None:
        self.stages = stages
        self.placement = placement
        self.restarts = restarts
        self.window = window
        self.state: State = "starting"
        self.generation = 0
        self.members: dict[Worker, Member] = {}
        self.coordinator: c.Coordinator | None = None  # from the moment that all are ready
        self.wanted: Placement | None = None
        self.cause = ""  # of a failure
        self.failed_step = ""
        self.failures: list[int] = []  # within the window
        self.failed_times = 0  # in all
        self._lost_joining: list[int] = []
        self._haste = False
        self._has_run = False
        self._starting = False  # whether this generation's workers have been told to start
        self._draining = False  # whether sources have been told to stop
        self._hurt: tuple[int, str] | None = None
        self._incarnations = 0
        self._out: list[Order] = []

    # ------------------------------------------------------------ what happens

    def start(self, now: int) -> list[Order]:
        """Begin."""
        return self._orders(now)

    def expects(self, worker: Worker, incarnation: int) -> bool:
        """Whether this process is waited for."""
        member = self.members.get(worker)
        return (
            member is not None
            and member.incarnation == incarnation
            and not member.leaving
            and member.address is None
        )

    def up(self, worker: Worker, incarnation: int, address: Address, now: int) -> list[Order]:
        """A worker's process has come. Raises `StaleWorkerError` if nobody waits for it."""
        if not self.expects(worker, incarnation):
            raise StaleWorkerError(f"worker {worker}, incarnation {incarnation}, is not expected")
        self.members[worker].address = address
        return self._orders(now)

    def unfit(self, worker: Worker, why: str, now: int) -> list[Order]:
        """A worker that is expected cannot load the flow: then no flow can run there."""
        end = self._fail if self.coordinator is None else self._give_up_rescale
        end(f"worker {worker}: {why}")
        return self._orders(now)

    def down(self, worker: Worker, incarnation: int, why: str, now: int) -> list[Order]:
        """A worker's process has ended, or nobody can talk to it any more."""
        member = self.members.get(worker)
        if member is None or member.incarnation != incarnation:
            return []
        del self.members[worker]
        if not member.leaving and not self.over:
            lost = f"worker {worker} is lost: {why}"
            if self.coordinator is not None and worker not in self.coordinator.members:
                self._lost_before_joining(lost, now)
            else:
                self._restart(lost, now)
        return self._orders(now)

    def reported(self, worker: Worker, report: WorkerReport, now: int) -> list[Order]:
        """A worker reported."""
        member = self.members.get(worker)
        if member is None or report.generation != self.generation:
            return []
        if member.leaving or self.over:
            if isinstance(report, Failed) and report.final:  # of links it is no wonder
                self._happened("trouble", f"worker {worker}, on its way out: {report.error}")
            return self._orders(now)
        match report:
            case Ready():
                member.ready = True
                if self.coordinator is not None:
                    self._follow(self.coordinator.joined(worker))
            case Joined():
                assert self.coordinator is not None
                self._follow(self.coordinator.joined(worker))
            case Report(_, stage, told):
                assert self.coordinator is not None
                self._follow(self.coordinator.reported(worker, stage, told))
            case Ended():
                member.ended = True
            case Failed(_, error, final, step):
                if final:
                    self.failed_step = step
                    self._fail(f"worker {worker}: {error}")
                elif self._hurt is None:
                    self._hurt = (now, f"worker {worker}: {error}")
        return self._orders(now)

    def scale(self, placement: Placement, now: int) -> list[Order]:
        """Someone wants this placement; replaces a request that has not begun."""
        if self.over or self.state == "stopping":
            raise LifecycleError(f"the flow is {self.state}: it cannot be rescaled")
        self.wanted = placement
        self._lost_joining = []
        return self._orders(now)

    def stop(self, now: int) -> list[Order]:
        """Let the sources end, and the flow with them."""
        if not self.over and self.state != "stopping":
            self.wanted = None
            self._happened("stopping", "stopping: sources end, what is under way is finished")
            if self.coordinator is not None:
                self.state = "stopping"
            elif self.failed_times and self._has_run:
                self._fail(
                    "stopped while it was to start again: what it had read is not all written"
                )
            else:
                self._happened("finished", "stopped before it began")
                self._end("finished")
        return self._orders(now)

    def abort(self, why: str, now: int) -> list[Order]:
        """End at once."""
        self._haste = True
        if not self.over:
            self._fail(why)
        return self._orders(now)

    def tick(self, now: int) -> list[Order]:
        """Time has passed."""
        return self._orders(now)

    # ------------------------------------------------------------ what people see

    @property
    def over(self) -> bool:
        """Whether nothing more is to come but the end of processes."""
        return self.state in ("finished", "failed")

    @property
    def gone(self) -> bool:
        """Whether it is over, and no process is left."""
        return self.over and not self.members

    @property
    def shown(self) -> State:
        """The state, for people."""
        busy = self.coordinator is not None and self.coordinator.phase != "idle"
        return "rescaling" if self.state == "running" and (busy or self.wanted) else self.state

    # ------------------------------------------------------------ what follows

    def _orders(self, now: int) -> list[Order]:
        while self._advance(now):
            pass
        self._hurry(now)
        out, self._out = self._out, []
        return out

    def _advance(self, now: int) -> bool:
        """Do the next thing that can be done; False if there is none."""
        if self.over:
            return False
        if self._hurt is not None and now - self._hurt[0] >= GRACE:
            self._restart(self._hurt[1], now)
            return True
        if self.coordinator is None:
            return self._begin_generation(now)
        idle = self.coordinator.phase == "idle" and self.coordinator.queued is None
        if not idle:
            return False
        if self.state == "stopping" and not self._draining:
            self._draining = True
            for worker in self.coordinator.members:
                self._to(worker, StopSources(self.generation))
            return True
        if all(self.members[worker].ended for worker in self.coordinator.members):
            self._happened("finished", "all sources have ended, and everything is written")
            self._end("finished")
            return True
        return self.wanted is not None and self._try_scale(self.wanted, now)

    def _begin_generation(self, now: int) -> bool:
        """When all are up, let them start; when all are ready, let them begin."""
        for worker in self.placement.workers:
            if worker not in self.members:
                self._launch(worker, now)
        if any(map(self._is_leaving_or_coming, self.placement.workers)):
            return False
        if all(self.members[worker].ready for worker in self.placement.workers):
            self.coordinator = c.Coordinator(self.placement, self.stages)
            self.state = "running"
            self._has_run = True
            for worker in self.placement.workers:
                self._to(worker, Begin(self.generation))
            size = len(self.placement.workers)
            self._happened("running", f"running on {size} worker{'s' * (size != 1)}")
            return True
        if self._starting:
            return False
        self._starting = True
        self.generation += 1
        for worker in self.placement.workers:
            below = [other for other in self.placement.workers if other < worker]
            self._start_worker(worker, self.placement.workers, below)
        return True

    def _start_worker(
        self, worker: Worker, members: tuple[Worker, ...], dial: Iterable[Worker]
    ) -> None:
        epochs = (0,) * self.stages if self.coordinator is None else tuple(self.coordinator.epochs)
        addresses = tuple((other, self._address(other)) for other in dial)
        order = Start(self.generation, self.placement, members, epochs, addresses)
        self._to(worker, order)

    def _address(self, worker: Worker) -> Address:
        address = self.members[worker].address
        assert address is not None
        return address

    # ------------------------------------------------------------ rescaling

    def _try_scale(self, wanted: Placement, now: int) -> bool:
        """Launch who is missing; with all there, begin."""
        assert self.coordinator is not None
        for worker in [w for w in self.members if w not in self.coordinator.members]:
            if worker not in wanted.workers:
                self._dismiss(worker)
        missing = [worker for worker in wanted.workers if worker not in self.members]
        for worker in missing:
            self._launch(worker, now)
        waiting = [w for w in wanted.workers if self._is_leaving_or_coming(w)]
        if waiting:
            return False
        self.wanted = None
        self._lost_joining = []
        size = len(wanted.workers)
        self._happened("rescaling", f"rescaling to {size} worker{'s' * (size != 1)}")
        self._follow(self.coordinator.rescale(wanted))
        return True

    def _is_leaving_or_coming(self, worker: Worker) -> bool:
        member = self.members[worker]
        return member.leaving or member.address is None

    def _follow(self, orders: Iterable[c.Order]) -> None:
        """Carry out what the coordinator wants."""
        for order in orders:
            match order:
                case c.Launch(workers, members):
                    for worker in workers:
                        dial = [w for w in members if w not in workers or w < worker]
                        self._start_worker(worker, members, dial)
                case c.Begin(worker):
                    self._to(worker, Begin(self.generation))
                case c.Tell(worker, stage, event):
                    self._to(worker, Tell(self.generation, stage, event))
                case c.EndSources(worker):
                    self._to(worker, EndSources(self.generation))
                case c.Stop(worker):
                    self._dismiss(worker)
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
        if self.state == "stopping":
            self._fail(f"{why}; the flow was stopping, and has not written all of its results")
            return
        if len(self.failures) > self.restarts:
            self._fail(f"{why} (failure {len(self.failures)} within {self.window // SECOND} s)")
            return
        if self.coordinator is not None and self.coordinator.target is not None:
            self.placement = self.coordinator.target
        was_begun = self.coordinator is not None
        self.coordinator = None
        self._hurt = None
        self._starting = False
        self._draining = False
        self.generation += 1  # reports of the old one are stale from now on
        for worker in list(self.members):
            member = self.members[worker]
            member.ready = member.ended = False
            if worker not in self.placement.workers:
                self._dismiss(worker)
        self.state = "starting"
        again = "the flow starts again from its sources" if was_begun else "trying again"
        self._happened("restarting", f"{why}; {again}")

    def _lost_before_joining(self, why: str, now: int) -> None:
        """A worker that was to join was lost before it did: the flow itself is well."""
        lost = [at for at in self._lost_joining if now - at < self.window]
        self._lost_joining = [*lost, now]
        if self.wanted is not None and len(self._lost_joining) > self.restarts:
            self._give_up_rescale(why)

    def _give_up_rescale(self, why: str) -> None:
        """Before it has begun: whoever was launched for it goes."""
        self.wanted = None
        self._happened("not-rescaled", f"{why}; the flow stays as it is")
        assert self.coordinator is not None
        for worker in [w for w in self.members if w not in self.coordinator.members]:
            self._dismiss(worker)

    def _fail(self, why: str) -> None:
        self.cause = why
        self._happened("failed", why)
        self._end("failed")

    def _end(self, state: State) -> None:
        self.state = state
        self.wanted = None
        for worker in list(self.members):
            self._dismiss(worker)

    def _dismiss(self, worker: Worker) -> None:
        member = self.members[worker]
        if member.leaving:
            return
        member.leaving = True
        if member.address is None:
            self._cancel(worker, member)
        else:
            self._to(worker, Stop())

    def _cancel(self, worker: Worker, member: Member) -> None:
        member.cancelled = True
        self._give(Cancel(worker, member.incarnation))

    def _hurry(self, now: int) -> None:
        """Who was told to leave, and does not, is ended by force."""
        patience = HASTE if self._haste else LEAVE
        for worker, member in self.members.items():
            if not member.leaving or member.cancelled:
                continue
            if member.told is None:
                member.told = now
            elif now - member.told >= patience:
                self._cancel(worker, member)

    def _launch(self, worker: Worker, now: int) -> None:
        self._incarnations += 1
        self.members[worker] = Member(self._incarnations, now)
        self._give(Launch(worker, self._incarnations))

    def _happened(self, kind: str, text: str) -> None:
        self._give(Happened(kind, text))

    def _to(self, worker: Worker, order: WorkerOrder) -> None:
        self._give(To(worker, order))

    def _give(self, order: Order) -> None:
        self._out.append(order)
