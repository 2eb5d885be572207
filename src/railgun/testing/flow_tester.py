"""FlowTester: run any flow on simulated workers in one process, and do to it what happens in real life.

>>> from railgun import Flow
>>> from railgun.connectors import Collect, Items
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
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from railgun.core.errors import RailgunError
from railgun.core.placement import Placement, Worker
from railgun.core.rescale import coordinator as c
from railgun.core.rescale import messages as m
from railgun.flow.flow import Flow
from railgun.flow.operators.operator import DeadLetter
from railgun.flow.source import Reader, Source
from railgun.wire.frames import FrameReader, Pressure, Taken, encode
from railgun.worker.runtime import Outside, Runtime

START = 1_700_000_000_000_000


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
    ) -> None:
        self.flow = flow
        self.now = now
        self._random = random.Random(seed)
        self._fed: dict[str, _Fed] = {}
        for name in feed:
            step = flow.steps.get(name)
            if step is None or step.kind != "source":
                raise TesterError(f"flow {flow.name!r} has no source {name!r} that could be fed")
            self._fed[name] = _Fed()
        self._items: dict[str, list[Any]] = {}
        self.generation = 0
        self.rescales = 0
        self._build(Placement.of(range(workers)))

    def _build(self, placement: Placement) -> None:
        """Start the flow from its sources."""
        plan = self.plan = self.flow.plan().with_sources(self._fed)
        self.generation += 1
        self.runtimes: dict[Worker, Runtime] = {}
        self._links: dict[tuple[Worker, Worker], deque[bytes]] = {}
        self._coordinator = c.Coordinator(placement, len(plan.stages))
        self._todo: deque[Worker] = deque()
        for worker in placement.workers:
            self._start(worker, placement, placement.workers)
        for runtime in self.runtimes.values():
            runtime.begin(self.now)

    def _start(self, worker: Worker, placement: Placement, members: Sequence[Worker]) -> None:
        outside = Outside(
            send=partial(self._send, worker),
            report=partial(self._report, worker),
            to_driver=self._collect,
            clock=lambda: self.now,
        )
        epochs = self._coordinator.epochs
        self.runtimes[worker] = Runtime(
            self.plan, worker, self.generation, placement, members, epochs, outside, self.now
        )

    # ------------------------------------------------------------ what a test does

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers there are."""
        return tuple(sorted(self.runtimes))

    def feed(self, source: str, items: Iterable[Any], *, settle: bool = True) -> None:
        """Let a source that was named in `feed` bring these items, now."""
        if source not in self._fed:
            raise TesterError(
                f"{source!r} is not fed: name it in FlowTester(..., feed=[{source!r}])"
            )
        self._fed[source].items += items
        if settle:
            self.settle()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += int(seconds * 1_000_000)
        self.settle()

    def rescale(self, workers: int, *, settle: bool = True) -> None:
        """Ask for another number of workers; without `settle` it goes on as the test goes on (`run`)."""
        if workers < 1:
            raise TesterError(f"a flow needs at least one worker, not {workers}")
        self._obey(self._coordinator.rescale(Placement.of(range(workers))))
        if settle:
            self.settle()

    def place(self, placement: Placement, *, settle: bool = True) -> None:
        """Ask for any placement, for example one that gives a hot key a worker of its own."""
        self._obey(self._coordinator.rescale(placement))
        if settle:
            self.settle()

    def crash(self, worker: Worker) -> None:
        """A worker dies: the flow starts again from its sources, as long as there is no snapshot."""
        if worker not in self.runtimes:
            raise TesterError(f"there is no worker {worker}: there are {self.workers}")
        placement = self._coordinator.placement
        self._items.clear()
        self._build(placement)
        self.settle()

    def finish(self) -> None:
        """Let all sources end, and the flow with them."""
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
        return self._items.get(step, [])

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The flow's dead letters, if its sink for them is `Collect`."""
        return self.collected("dead_letters")

    def state(self, step: str) -> dict[Any, Any]:
        """The state of a step, over all workers: a key that is on two of them is an error."""
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
        if not known:
            raise TesterError(f"flow {self.flow.name!r} has no step {step!r} with state")
        return found

    def where(self, step: str) -> dict[Any, Worker]:
        """The worker that holds the state of each key."""
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
        """Let so many things happen: a message arrives, or a worker works. False: nothing is left to do."""
        self._idle_round = False  # the test may have done something since the last step
        return all(self._happen() for _ in range(steps))

    def settle(self) -> None:
        """Let happen what happens, until nothing does any more at this time."""
        self._idle_round = False
        while self._happen():
            pass

    def _happen(self) -> bool:
        full = [link for link, queue in self._links.items() if queue]
        if full and (not self._todo or self._random.random() < 0.7):
            self._arrive(*self._random.choice(full))
            return True
        if not self._todo:
            self._todo = deque(self._random.sample(self.workers, len(self.workers)))
            self._idle_round = True
        worker = self._todo.popleft()
        if worker in self.runtimes and self._pump(self.runtimes[worker]):
            self._idle_round = False
        if self._todo or not self._idle_round:
            return True
        return any(self._links.values())

    def _pump(self, runtime: Runtime) -> bool:
        runtime.hurry()
        before = self._activity + runtime.work
        runtime.pump(self.now)
        return self._activity + runtime.work != before

    _activity = 0
    _idle_round = True

    def _arrive(self, sender: Worker, to: Worker) -> None:
        data = self._links[sender, to].popleft()
        runtime = self.runtimes.get(to)
        if runtime is None:
            return
        for frame in FrameReader().feed(data):
            assert not isinstance(frame.message, Pressure | Taken)
            runtime.receive(sender, frame.stage, frame.message)

    def _send(self, sender: Worker, to: Worker, stage: int, message: m.Message) -> None:
        self._activity += 1
        queue = self._links.setdefault((sender, to), deque())
        queue.append(encode(self.generation, stage, message))

    def _report(self, worker: Worker, stage: int, report: m.Command) -> None:
        self._obey(self._coordinator.reported(worker, stage, report))

    def _collect(self, step: str, items: Sequence[Any]) -> None:
        self._items.setdefault(step, []).extend(items)

    def _obey(self, orders: Sequence[c.Order]) -> None:
        self._activity += len(orders)
        for order in orders:
            match order:
                case c.Launch(workers, members):
                    for worker in workers:
                        self._start(worker, self._coordinator.placement, members)
                        self._obey(self._coordinator.joined(worker))
                case c.Begin(worker):
                    self.runtimes[worker].begin(self.now)
                case c.Tell(worker, stage, event):
                    self.runtimes[worker].tell(stage, event)
                    if isinstance(event, m.Join) and stage == len(self.plan.stages) - 1:
                        self._obey(self._coordinator.joined(worker))
                case c.EndSources(worker):
                    self.runtimes[worker].end_sources()
                case c.Stop(worker):
                    self.runtimes.pop(worker).close()
                    for link in [link for link in self._links if worker in link]:
                        del self._links[link]  # what is still on the way to it ends with it
                case c.Rescaled():
                    self.rescales += 1
                case _:
                    raise TesterError(f"cannot {order}")


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
