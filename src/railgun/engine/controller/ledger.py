"""Add data to the lifecycle machine's orders and take data out of workers' reports: snapshots and collected items.

The machine knows only numbers: it orders workers to start with snapshot 7, and learns that they have saved it. The
*ledger* adds the content: to `Start` the list of files to load, to `Settled` the output that one worker commits for
others. What a worker saved goes to the storekeeper, what it collected to the items. The ledger has no sockets and no
threads: the controller uses it, and so do simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from railgun.engine.controller.collected import Collected
from railgun.engine.controller.ingest import Feeds
from railgun.engine.controller.storekeeper import Storekeeper
from railgun.engine.protocol.ingest.messages import Owner
from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.lifecycle.machine import Lifecycle
from railgun.engine.protocol.placement import Worker
from railgun.engine.worker import control_messages as control
from railgun.flows.errors import UncollectableError
from railgun.flows.plan import Plan
from railgun.transport.columns import CannotUnpickleError, decode_column


class Ledger:
    """The snapshots, collected items and connector streams of one job."""

    def __init__(self, life: Lifecycle, keeper: Storekeeper | None, plan: Plan) -> None:
        self.life = life
        self.keeper = keeper
        self.feeds = Feeds(plan)
        self.collected = Collected()
        self.started = life.generation  # the last generation that was started
        self._together = plan.commits_together

    def sent(self, worker: Worker, order: o.WorkerOrder) -> Iterator[o.WorkerOrder | control.Load]:
        """Yield the messages to send for an order of the machine. Call this when sending; the worker may be gone
        already.
        """
        coordinator = self.life.coordinator
        if isinstance(order, o.Start):
            if order.generation != self.started:
                self.started = order.generation
                self.collected.go_back(order.snapshot)
                if self.keeper is not None:
                    self.keeper.new_generation(order.generation)
                manifest = (
                    None if self.keeper is None or order.snapshot is None else self.keeper.manifest
                )
                self.feeds.go_back(order.generation, manifest, map(self.owner, order.members))
            elif coordinator is not None:
                self.collected.join(worker, coordinator.snapshot)
                self.feeds.joined(self.owner(worker))
            load = None if self.keeper is None or order.snapshot is None else self.keeper.load()
            if load is not None:
                yield load
        elif isinstance(order, o.Settled) and order.committed:
            assert self.keeper is not None
            if coordinator is not None and worker == coordinator.members[0]:
                order = replace(order, tokens=self.keeper.tokens_for_one(self._together))
        yield order

    def owner(self, worker: Worker) -> Owner:
        """Return the identity of a worker's present process."""
        return worker, self.life.members[worker].incarnation

    def keep(
        self,
        order: o.Record | o.Write | o.GiveUp,
        soon: Callable[[Callable[[], list[o.Order]]], None],
        now: Callable[[], int],
    ) -> None:
        """Let the storekeeper carry out an order.

        When it is done, any thread calls `soon` with a function that tells the machine and returns its orders.
        """
        assert self.keeper is not None

        def done(error: str) -> None:
            soon(partial(self._kept, order, error, now))

        match order:
            case o.Record():
                self.keeper.record(order, done)
            case o.Write():
                reports = {
                    self.owner(worker): report
                    for worker, report in self.keeper.reports.items()
                    if worker in self.life.members
                }
                streams, reached = self.feeds.snapshot(order.snapshot, reports)
                self.keeper.write(order, self.life.generation, done, streams, reached)
            case o.GiveUp():
                self.keeper.give_up(order)

    def _kept(
        self, order: o.Record | o.Write | o.GiveUp, error: str, now: Callable[[], int]
    ) -> list[o.Order]:
        assert self.keeper is not None
        if isinstance(order, o.Record):
            return self.life.recorded(order.snapshot, error, now())
        if not error:
            self.keeper.written()
            self.feeds.committed(order.snapshot)
        return self.life.written(order.snapshot, error, now())

    def heard(
        self, worker: Worker, report: o.WorkerReport | control.Items | control.Mark
    ) -> o.WorkerReport | None:
        """Record the data in a worker's report. Return the report that the machine is to receive, or None."""
        current = report.generation == self.life.generation
        match report:
            case control.Items(generation, stage, step, data, rows):
                if current:
                    try:
                        items = decode_column(data, rows)
                    except CannotUnpickleError as error:
                        collect_error = UncollectableError(step, "", "", "", str(error))
                        return o.Failed(generation, str(collect_error), final=True, step=step)
                    self.collected.add((worker, stage), step, items)
                return None
            case control.Mark(_, stage, step, snapshot):
                if current:
                    self.collected.mark((worker, stage), step, snapshot)
                return None
            case o.Saved() if current and self.keeper is not None:
                self.keeper.saved(worker, report)
            case o.Farewell() if current and self.keeper is not None:
                self.keeper.farewell(report)
                if worker in self.life.members:
                    self.feeds.left(self.owner(worker), report)
        return report
