"""FlowTester: run any flow on simulated workers in one process, and do to it what happens in real life.

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
on a real link, and links deliver in an order drawn from `seed`; the same seed gives the same run. Time stands still
unless `advance` moves it.

A function that returns its state as the result, and changes it with the next record, is found: the tester raises
`SharedStateError`, which names step and key. Return a copy. (On workers such results are copied.) So is a function that
changes items in place which another step gets, too: `SharedItemError`.

A flow that has failed (more than five crashes within five minutes) says so: whatever lets it go on, or asks for its
state, raises the `FlowFailedError` that `Job.wait` would.

With `snapshots=True` the flow can be saved, and goes back to what was saved when a worker dies:

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

START = 1_700_000_000_000_000
NEVER = 1e9  # seconds


class TesterError(RailgunError):
    """A test asks for something that cannot be."""


class FlowTester:
    """A flow on simulated workers."""

    def __init__(
        self,
        flow: Flow,
        workers: int = 2,
        *,
        feed: Iterable[str] = (),
        seed: int = 0,
        now: int = START,
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
            keeper = Storekeeper(self.plan, Snapshots("", every=NEVER), flow.name, disk=disk)
        self.world = World(self.plan, workers, random.Random(seed), now, keeper)
        self.world.strict = True
        while self.world.life.coordinator is None:
            self.world.happen()

    # ------------------------------------------------------------ what a test does

    @property
    def now(self) -> int:
        """The time (µs)."""
        return self.world.now

    @now.setter
    def now(self, time: int) -> None:
        self.world.now = time

    @property
    def runtimes(self) -> dict[Worker, Runtime]:
        """What each worker runs."""
        return self.world.runtimes

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers there are."""
        return tuple(sorted(self.runtimes))

    @property
    def rescales(self) -> int:
        """How many rescales are over."""
        return sum(happened.kind == "rescaled" for happened in self.happened)

    @property
    def happened(self) -> list[Happened]:
        """What people would have been told."""
        return self.world.happened

    def feed(self, source: str, items: Iterable[Any], *, settle: bool = True) -> None:
        """Let a source that was named in `feed` bring these items, now. Raises `FlowFailedError` if the flow failed."""
        if source not in self._fed:
            raise TesterError(
                f"{source!r} is not fed: name it in FlowTester(..., feed=[{source!r}])"
            )
        self._check_well()
        self._fed[source].items += items
        if settle:
            self.settle()

    def advance(self, seconds: float) -> None:
        """Let time pass. Raises `FlowFailedError` if the flow failed."""
        self._check_well()
        self.world.now += int(seconds * 1_000_000)
        self.settle()

    def rescale(self, workers: int, *, settle: bool = True) -> None:
        """Ask for another number of workers; without `settle` it goes on as the test goes on (`run`)."""
        if workers < 1:
            raise TesterError(f"a flow needs at least one worker, not {workers}")
        self.place(Placement.of(range(workers)), settle=settle)

    def place(self, placement: Placement, *, settle: bool = True) -> None:
        """Ask for any placement, for example one that gives a hot key a worker of its own."""
        world = self.world
        world.do(world.life.scale(placement, world.life_now))
        if settle:
            self.settle()

    def snapshot(self, *, settle: bool = True) -> int | None:
        """Take a snapshot; its number, or None if it was given up. Without `settle` it goes on as the test goes on."""
        world = self.world
        world.do(world.life.snapshot(world.life_now))
        if not settle:
            return None
        self.settle()
        saving = world.life.saving
        return saving.committed if saving.committed == saving.number else None

    def crash(self, worker: Worker, *, settle: bool = True) -> None:
        """A worker dies: the flow goes back to its last snapshot, or, if there is none, to its sources.

        Raises `TesterError` if there is no such worker, and `FlowFailedError` if the flow failed, perhaps with this.
        """
        self._check_well()
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
            there = ", ".join(map(str, sorted(world.processes)))
            raise TesterError(f"there is no worker {worker}: there are {there}")
        self.world.gone(process, "it crashed")
        if settle:
            self.settle()

    def finish(self) -> None:
        """Let all sources end, and the flow with them. Raises `FlowFailedError` if the flow failed."""
        for fed in self._fed.values():
            fed.ending = True
        self.settle()
        late = [runtime.worker for runtime in self.runtimes.values() if not runtime.ended]
        if late:
            raise TesterError(
                f"workers {late} have not ended: some source still has something to say"
            )

    def collected(self, step: str) -> list[Any]:
        """What a `Collect` sink has got."""
        return self.world.ledger.collected.items(step)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The flow's dead letters, if its sink for them is `Collect`."""
        return self.collected("dead_letters")

    def state(self, step: str) -> dict[Any, Any]:
        """The state of a step, over all workers: a key that is on two of them is an error.

        Raises `FlowFailedError` if the flow failed: its workers are gone, and their state with them.
        """
        self._check_well()
        found: dict[Any, Any] = {}
        known = False
        for runtime in self.runtimes.values():
            for runner in runtime.stages:
                for operator in runner.operators.keyed:
                    if operator.step == step:
                        known = True
                        states = operator.store.items()
                        twice = found.keys() & states.keys()
                        if twice:
                            raise TesterError(f"keys {sorted(twice, key=repr)[:5]} have two states")
                        found.update(states)
        stateful = {one.name for one in steps_of(self.plan) if one.kind != "sink"}
        if not self.runtimes and step in stateful:
            raise TesterError(
                f"no worker has the state of {step!r} now: the flow starts again. Let it go on first (settle, run)"
            )
        if not known:
            raise TesterError(f"flow {self.flow.name!r} has no step {step!r} with state")
        return found

    def where(self, step: str) -> dict[Any, Worker]:
        """The worker that holds the state of each key. Raises `FlowFailedError` if the flow failed."""
        self._check_well()
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
        """Let so many things happen: a message arrives, or a worker works. False: nothing is left to do.

        Raises `FlowFailedError` if the flow failed.
        """
        self.world.stir()  # the test may have done something since the last step
        went_on = all(self.world.happen() for _ in range(steps))
        self._check_well()
        return went_on

    def settle(self) -> None:
        """Let happen what happens, until nothing does any more at this time. Raises `FlowFailedError` if it failed."""
        self.world.stir()
        while self.world.happen():
            pass
        self._check_well()
        for runtime in self.runtimes.values():
            runtime.check_items()

    def _check_well(self) -> None:
        """Raise the error that the flow has failed with, if it has."""
        if self.world.life.state == "failed":
            raise FlowFailedError(self.world.life.cause)


class _Fed(Source[Any]):
    """A source that brings what the test feeds it."""

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
