"""Run any flow on simulated workers in one process (`FlowTester`), with rescales, crashes and snapshots.

>>> from railgun import Flow
>>> from railgun.sinks.collect import Collect
>>> from railgun.sources.items import Items
>>> flow = Flow("totals")
>>> numbers = flow.source(Items([]), name="numbers")
>>> numbers.key_by(lambda n: n % 10).reduce(lambda a, b: a + b, name="sum").sink(Collect(), name="out")
>>> tester = FlowTester(flow, workers=2, feed=["numbers"])
>>> tester.feed("numbers", range(100))
>>> tester.rescale(5)
>>> tester.feed("numbers", range(100))
>>> tester.state("sum")[7]
1040
>>> tester.finish()
>>> len(tester.collected("out"))
200

Workers run the production runtime: distributors, operators, state. Every message between them is encoded and decoded as
on a real link. Links deliver in an order drawn from `seed`: the same seed gives the same run. Time stands still unless
`advance` moves it.

The tester detects functions that return their state as the result and change it with the next record: it raises
`SharedStateError`, which names step and key. Return a copy instead. (Real workers copy such results.) It also detects
functions that change in place items which another step receives too: `SharedItemError`.

When a flow has failed (more than five crashes within five minutes), methods that let it go on or return its state raise
`FlowFailedError`, as `Job.wait` does.

With `snapshots=True` the flow can take snapshots, and goes back to the last one when a worker dies:

>>> tester = FlowTester(flow, workers=2, feed=["numbers"], snapshots=True)
>>> tester.feed("numbers", range(100))
>>> tester.snapshot()
1
>>> tester.feed("numbers", range(50))
>>> tester.crash(0)  # reads the last 50 again
>>> tester.state("sum")[7], len(tester.collected("out"))
(655, 150)
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from railgun.engine.controller.controller import FlowFailedError
from railgun.engine.controller.storekeeper import Snapshots, Storekeeper, steps_of
from railgun.engine.operators.operator import DeadLetter
from railgun.engine.protocol.lifecycle.messages import Happened
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.worker.runtime import Runtime
from railgun.errors import RailgunError
from railgun.flows.flow import Flow
from railgun.flows.source import Reader, Source
from railgun.storage.object_store import Disk
from railgun.testing.disks import SimulatedDisk
from railgun.testing.world import World

START_US = 1_700_000_000_000_000
NEVER_S = 1e9


class TesterError(RailgunError):
    """A test asks for something impossible."""


class FlowTester:
    """A flow on simulated workers.

    - `feed`: names of sources that the test feeds with items (`feed`).
    - `seed`: decides in which order messages are delivered.
    - `now`: the time at the start (µs).
    - `snapshots`: True to take snapshots on a simulated disk, or the disk to use.
    """

    def __init__(
        self,
        flow: Flow,
        workers: int = 2,
        *,
        feed: Iterable[str] = (),
        seed: int = 0,
        now: int = START_US,
        snapshots: bool | Disk = False,
    ) -> None:
        self.flow = flow
        self._fed: dict[str, _Fed] = {}
        for name in feed:
            step = flow.steps.get(name)
            if step is None or step.kind != "source":
                raise TesterError(f"flow {flow.name!r} has no source {name!r} that could be fed")
            self._fed[name] = _Fed()
        self.plan = flow.plan().with_sources(self._fed)
        keeper = None
        if snapshots is not False:
            disk = SimulatedDisk() if snapshots is True else snapshots
            keeper = Storekeeper(self.plan, Snapshots("", every=NEVER_S), flow.name, disk=disk)
        self.world = World(self.plan, workers, random.Random(seed), now, keeper)
        self.world.strict = True
        while self.world.life.coordinator is None:
            self.world.happen()

    # ------------------------------------------------------------ for tests

    @property
    def now(self) -> int:
        """The current time (µs)."""
        return self.world.now

    @now.setter
    def now(self, time: int) -> None:
        self.world.now = time

    @property
    def runtimes(self) -> dict[Worker, Runtime]:
        """Return the runtime of each worker."""
        return self.world.runtimes

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Return the numbers of the workers."""
        return tuple(sorted(self.runtimes))

    @property
    def rescales(self) -> int:
        """Return the number of rescales that are done."""
        return sum(happened.kind == "rescaled" for happened in self.happened)

    @property
    def happened(self) -> list[Happened]:
        """Return the events that `Job.events` would return."""
        return self.world.happened

    def feed(self, source: str, items: Iterable[Any], *, settle: bool = True) -> None:
        """Let a source that was named in `feed` bring these items now. Raises `FlowFailedError` if the flow failed."""
        if source not in self._fed:
            raise TesterError(
                f"{source!r} is not fed: name it in FlowTester(..., feed=[{source!r}])"
            )
        self._check_not_failed()
        self._fed[source].items += items
        if settle:
            self.settle()

    def advance(self, seconds: float) -> None:
        """Move the time forward. Raises `FlowFailedError` if the flow failed."""
        self._check_not_failed()
        self.world.now += int(seconds * 1_000_000)
        self.settle()

    def rescale(self, workers: int, *, settle: bool = True) -> None:
        """Ask for another number of workers. Without `settle`, call `run` to let the rescale go on."""
        if workers < 1:
            raise TesterError(f"a flow needs at least one worker, not {workers}")
        self.place(Placement.of(range(workers)), settle=settle)

    def place(self, placement: Placement, *, settle: bool = True) -> None:
        """Ask for any placement, for example one that gives a hot key its own worker."""
        world = self.world
        world.do(world.life.scale(placement, world.life_now))
        if settle:
            self.settle()

    def snapshot(self, *, settle: bool = True) -> int | None:
        """Take a snapshot and return its number, or None if it failed.

        Without `settle` return None at once; call `run` to let the snapshot go on.
        """
        world = self.world
        world.do(world.life.snapshot(world.life_now))
        if not settle:
            return None
        self.settle()
        saving = world.life.saving
        return saving.committed if saving.committed == saving.number else None

    def crash(self, worker: Worker, *, settle: bool = True) -> None:
        """Kill a worker. The flow goes back to its last snapshot, or to the start of its sources if there is none.

        Raises `TesterError` if there is no such worker, and `FlowFailedError` if the flow has failed, perhaps because
        of this crash.
        """
        self._check_not_failed()
        world = self.world
        process = world.processes.get(worker)
        if process is None and world.life.over:
            raise TesterError(f"the flow has finished: there is no worker {worker} any more")
        if process is None and worker in world.life.members:
            raise TesterError(
                f"worker {worker} is being launched, and cannot crash before it is there: "
                "let the flow go on first (settle, run)"
            )
        if process is None:
            running = ", ".join(map(str, sorted(world.processes)))
            raise TesterError(f"there is no worker {worker}: there are {running}")
        self.world.gone(process, "it crashed")
        if settle:
            self.settle()

    def finish(self) -> None:
        """End all sources and with them the flow. Raises `FlowFailedError` if the flow failed."""
        for fed in self._fed.values():
            fed.ending = True
        self.settle()
        unfinished = [runtime.worker for runtime in self.runtimes.values() if not runtime.ended]
        if unfinished:
            raise TesterError(
                f"workers {unfinished} have not ended: some source still has something to say"
            )

    def collected(self, step: str) -> list[Any]:
        """Return the items that the `Collect` sink `step` has received."""
        return self.world.ledger.collected.items(step)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """Return the flow's dead letters, if its sink for them is `Collect`."""
        return self.collected("dead_letters")

    def state(self, step: str) -> dict[Any, Any]:
        """Return the state of a step by key, over all workers.

        Raises `TesterError` if two workers have a state of the same key, and `FlowFailedError` if the flow failed,
        because then its workers are gone with their state.
        """
        self._check_not_failed()
        states_by_key: dict[Any, Any] = {}
        has_step = False
        for runtime in self.runtimes.values():
            for runner in runtime.stages:
                for operator in runner.operators.keyed:
                    if operator.step == step:
                        has_step = True
                        states = operator.store.items()
                        duplicates = states_by_key.keys() & states.keys()
                        if duplicates:
                            raise TesterError(
                                f"keys {sorted(duplicates, key=repr)[:5]} have two states"
                            )
                        states_by_key.update(states)
        stateful = {info.name for info in steps_of(self.plan) if info.kind != "sink"}
        if not self.runtimes and step in stateful:
            raise TesterError(
                f"no worker has the state of {step!r} now: the flow starts again. Let it go on first (settle, run)"
            )
        if not has_step:
            raise TesterError(f"flow {self.flow.name!r} has no step {step!r} with state")
        return states_by_key

    def where(self, step: str) -> dict[Any, Worker]:
        """Return the worker that holds the state of each key. Raises `FlowFailedError` if the flow failed."""
        self._check_not_failed()
        return {
            key: worker
            for worker, runtime in self.runtimes.items()
            for runner in runtime.stages
            for operator in runner.operators.keyed
            if operator.step == step
            for keys in operator.store.census()
            for key in keys
        }

    # ------------------------------------------------------------ the simulation

    def run(self, steps: int) -> bool:
        """Simulate `steps` steps: each delivers a message or lets a worker work. Return False if nothing is left to do.

        Raises `FlowFailedError` if the flow failed.
        """
        self.world.wake()  # the test may have changed something since the last step
        went_on = all(self.world.happen() for _ in range(steps))
        self._check_not_failed()
        return went_on

    def settle(self) -> None:
        """Run until nothing is left to do at this time. Raises `FlowFailedError` if the flow failed."""
        self.world.wake()
        while self.world.happen():
            pass
        self._check_not_failed()
        for runtime in self.runtimes.values():
            runtime.check_items()

    def _check_not_failed(self) -> None:
        """Raise `FlowFailedError` if the flow has failed."""
        if self.world.life.state == "failed":
            raise FlowFailedError(self.world.life.cause)


class _Fed(Source[Any]):
    """A source that returns the items a test feeds it."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.ending = False

    def partitions(self) -> Sequence[str]:
        return ["fed"]

    def open(self, partition: Any, position: Any) -> Reader[Any]:
        return _FedReader(self, position or 0)


class _FedReader(Reader[Any]):
    def __init__(self, source: _Fed, position: int) -> None:
        self.source = source
        self.position: int = position

    def read(self, most: int, now: int) -> Sequence[Any] | None:
        read = self.source.items[self.position : self.position + most]
        self.position += len(read)
        return None if self.source.ending and not read else read
