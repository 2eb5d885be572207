"""A flow that connectors feed, simulated: workers with the production runtime, and chance decides what happens next.

A job is a chain of worlds on one disk, as in `crashes`. Connectors (with the production `Sender`) connect to any
worker, announce streams, send, lose their connections and come back, to the same worker or another. Meanwhile a *plan
of deeds* is carried out: the flow grows or shrinks, a worker is lost, the controller is lost. Now and then the disk
is full, so snapshots are given up. What must hold:

1. **Every snapshot that is committed** holds of each stream its first messages, each once and in order, and just those
   up to the position that its manifest says.
2. **What is acknowledged** is in the last of them, when it is said.
3. **The end.** All streams come to it, all is acknowledged, and what the sink has shown is the input.
4. **Late** are the same messages as if each stream were read from its beginning by one worker.

Connectors like the workers that will leave, and go also to one that drains: the rare things are the point. How often
they came about is in the job's `tally`, so that a test can say that they did.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from railgun.engine.controller import ingest as feeds
from railgun.engine.controller.storekeeper import Snapshots, Storekeeper
from railgun.engine.operators import receiving
from railgun.engine.operators.receiving import Receiving
from railgun.engine.protocol.frontier import MIN, late_rows
from railgun.engine.protocol.ingest.messages import (
    NONE,
    Acknowledge,
    Answer,
    Ask,
    FromTable,
    Hasten,
    Reason,
    Relinquish,
    Restart,
    SessionError,
)
from railgun.engine.protocol.ingest.registry import Active
from railgun.engine.protocol.ingest.sender import Phase, Sender, Sent
from railgun.engine.protocol.ingest.table import State
from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.placement import Worker
from railgun.engine.snapshots.manifest import Manifest
from railgun.engine.worker import control_messages as control
from railgun.flows.flow import Flow
from railgun.flows.sink import Place, Token, TwoPhaseSink, TwoPhaseWriter
from railgun.sources.connectors import ConnectorMessage, Connectors
from railgun.testing.disks import SimulatedDisk
from railgun.testing.world import Process, World
from railgun.transport.ingest_batch import pack
from railgun.transport.rows import RowBatch
from verification.ingest.exploration import Rules
from verification.rescale.model import Violation
from verification.snapshots.crashes import patched
from verification.stream_validator import check_streams

NOW: Final = 1_700_000_000_000_000
LONG: Final = 60_000  # steps; a job left in peace is through long before
CALM: Final = (0, 400, 400)  # steps that a connector rests which was sent away
FULL: Final = 0.15  # how often the disk is full
LAST: Final = 0.85  # how often a connector goes to the worker that would leave first
LATENESS: Final = 5_000_000
TIMES: Final = NOW + 1_000_000 * (
    np.arange(10_000) + np.arange(10_000) * 7 % 20
)  # of messages, by their ids
BOUNDS: Final = np.asarray(late_rows(TIMES, MIN, LATENESS)[0]).tolist()
DEEDS: Final = ("grow 1", "grow 4", "shrink 1", "shrink 4", "crash 1", "crash 2", "controller")


class Shelf(TwoPhaseSink[Any]):
    """A two-phase sink that outlives all workers, and remembers with which snapshot each item was shown."""

    def __init__(self) -> None:
        self.prepared: dict[str, tuple[int, list[Any]]] = {}
        self.shown: dict[str, tuple[int, list[Any]]] = {}
        self.numbers = itertools.count()

    def open(self, place: Place) -> TwoPhaseWriter[Any]:
        """Of one worker."""
        return _ShelfWriter(self, place)

    def commit(self, token: Token) -> None:
        """Show it, once."""
        if token not in self.shown:
            self.shown[token] = self.prepared.pop(token)

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        """Show these, and forget the rest."""
        for token in tokens:
            self.commit(token)
        self.prepared = {}

    def items(self) -> list[Any]:
        """What is shown, in the order of snapshots."""
        return in_order(self.shown.values())


def in_order(pieces: Iterable[tuple[int, list[Any]]]) -> list[Any]:
    """The items of pieces, in the order of the snapshots they are of."""
    return [item for _, items in sorted(pieces, key=lambda piece: piece[0]) for item in items]


class _ShelfWriter(TwoPhaseWriter[Any]):
    def __init__(self, shelf: Shelf, place: Place) -> None:
        self.shelf, self.place, self.items = shelf, place, list[Any]()

    def write(self, items: Sequence[Any]) -> None:
        self.items += items

    def prepare(self, snapshot: int) -> Token | None:
        if not self.items:
            return None
        token = f"{self.place.generation}/{snapshot}/{next(self.shelf.numbers)}"
        self.shelf.prepared[token], self.items = (snapshot, self.items), []
        return token


@dataclass(slots=True)
class SimulatedConnector:
    """A connector; what workers say to it waits in `inbox`."""

    number: int
    streams: Sequence[str]
    messages: int
    closes: int
    sender: Sender = field(default_factory=Sender)
    worker: Worker | None = None
    session: int = 0
    rests: int = 0  # until this step: it was sent away, and tries again later
    inbox: deque[tuple[int, Any]] = field(default_factory=deque)

    @property
    def sends(self) -> bool:
        """Whether there is something it has not sent."""
        return any(self.sender.stream(s).at < self.messages - 1 for s in self.streams)

    @property
    def done(self) -> bool:
        """Whether all it has is acknowledged."""
        return all(self.sender.stream(s).acked == self.messages - 1 for s in self.streams)


class _Door:
    """What stands for `engine.worker.ingest_listener` here."""

    def __init__(self, world: FedWorld, process: Process, receiving: Receiving) -> None:
        self.world, self.process, self.receiving = world, process, receiving
        self.sessions: dict[int, SimulatedConnector] = {}
        receiving.callers = self

    @property
    def closing(self) -> int:
        """How many streams have come to their end."""
        entries = self.receiving.table.entries.values()
        return sum(entry.state is State.CLOSING for entry in entries)

    @property
    def is_saving(self) -> bool:
        """Whether a snapshot has begun here that may be committed, or not."""
        saving = self.world.life.saving
        return saving.busy and saving.number == self.receiving.table.begun

    def carry_out(self, command: FromTable) -> None:
        runtime = self.process.runtime
        assert runtime is not None
        generation, step = runtime.generation, self.receiving.step
        match command:
            case Acknowledge(session, points):
                self.world.job.acknowledged(points)
                self._say(session, command)
            case Answer(session):
                self._say(session, command)
            case Restart(session):
                self._say(session, command)
                self.sessions.pop(session, None)
            case Ask(stream, session):
                self.process.tell(control.Asked(generation, step, stream, session))
            case Relinquish(stream, por, reached):
                self.process.tell(control.Relinquished(generation, step, stream, por, reached))
            case Hasten():
                self.process.tell(control.Hastened(generation))

    def _say(self, session: int, what: Any) -> None:
        if session in self.sessions:
            self.world.activity += 1
            self.sessions[session].inbox.append((session, what))

    def took(self, session: int, size: int) -> None:
        self._say(session, size)

    def refuse(self, session: int, error: SessionError) -> None:
        self.world.job.wrong("refused", f"a connector that keeps the rules: {error}")

    def let_go(self) -> None:
        for session in list(self.sessions):
            self._say(session, Restart(session))
        self.sessions = {}
        self.world.doors.pop(self.process, None)


class _Keeper(Storekeeper):
    """The production storekeeper; whatever it has committed is looked at."""

    job: FedJob

    def written(self) -> None:
        super().written()
        assert self.manifest is not None
        self.job.committed(self.manifest)

    def give_up(self, order: o.GiveUp) -> None:
        super().give_up(order)
        self.job.given_up()


class FedWorld(World):
    """A world with connectors."""

    connectors: Sequence[SimulatedConnector] = ()

    def __init__(self, job: FedJob, keeper: Storekeeper) -> None:
        self.doors: dict[Process, _Door] = {}
        self.job = job
        self.steps = 0
        super().__init__(job.plan, job.workers, job.chance, NOW, keeper, forgiving=True)

    def begun(self, process: Process) -> None:
        """A worker listens."""
        assert process.runtime is not None
        for one in process.runtime.receiving():
            self.doors[process] = _Door(self, process, one)
            judge = partial(self.job.judged, one.judge)
            setattr(one, "judge", judge)  # noqa: B010  (mypy takes no assignment to a method)

    def told_of_stream(self, process: Process, order: control.Streams) -> None:
        """As the door of a worker does it."""
        receiving = self.doors[process].receiving
        match order:
            case control.Granted(_, _, stream, session, por, reached):
                receiving.granted(stream, session, por, reached)
            case control.Rejected(_, _, stream, session):
                receiving.rejected(stream, session)
            case control.Wanted(_, _, stream):
                receiving.wanted(stream)

    def gone(self, process: Process, why: str) -> None:
        """A process has ended, and with it its connections."""
        door = self.doors.pop(process, None)
        if door is not None:
            door.let_go()
        super().gone(process, why)

    def hear(self, process: Process) -> None:
        """As before; it is counted what workers that leave hand over."""
        if isinstance(process.reports[0], o.Farewell):
            owner = process.worker, process.incarnation
            (registry,) = self.ledger.feeds.registries.values()
            had = [s for s in registry.streams.values() if isinstance(s, Active)]
            self.job.tally["farewells"] += 1
            self.job.tally["handed over"] += sum(stream.owner == owner for stream in had)
        super().hear(process)

    def _run_store(self) -> None:
        self.job.disk.full = self.chance.random() < self.job.full
        super()._run_store()
        self.job.disk.full = False

    def _work(self, worker: Worker) -> bool:
        door = next((d for p, d in self.doors.items() if p.worker == worker), None)
        before = 0 if door is None else door.closing
        worked = super()._work(worker)
        if door is not None and door.closing > before and door.is_saving:
            self.job.meanwhile["ended"] += 1
        return worked

    def happen(self) -> bool:
        """As before; but connectors always have something to do, so workers have to be given their turns."""
        self.steps += 1
        if self.processes and self.chance.random() < 0.3:
            self._work(self.chance.choice(sorted(self.processes)))
            return True
        return super().happen()

    def _things(self) -> list[Callable[[], None]]:
        return [*super()._things(), *self._fed_things()]

    def _fed_things(self) -> list[Callable[[], None]]:
        there = {process.worker: door for process, door in self.doors.items()}
        things: list[Callable[[], None]] = []
        for connector in self.connectors:
            if connector.inbox:
                things.append(partial(self._deliver, connector))
            if connector.worker is not None and connector.worker not in there:
                things.append(partial(self._lose, connector))
            elif connector.worker is None:
                if there and not connector.done and connector.rests <= self.steps:
                    things.append(partial(self._connect, connector, self._some_door(there)))
            else:
                things += self._session_things(connector, there[connector.worker])
        return things

    def _session_things(self, one: SimulatedConnector, door: _Door) -> list[Callable[[], None]]:
        things: list[Callable[[], None]] = []
        for name in one.streams:
            stream = one.sender.stream(name)
            if stream.phase is Phase.IDLE and stream.acked < one.messages - 1:
                if one.rests <= self.steps:
                    things.append(partial(self._notify, one, door, stream))
            elif one.sender.may_send(stream):
                things.append(partial(self._send_some, one, door, stream))
        if one.closes and self.chance.random() < 0.02:
            things.append(partial(self._close, one, door))
        return things

    def _some_door(self, there: Mapping[Worker, _Door]) -> _Door:
        last = self.chance.random() < LAST
        return there[max(there) if last else self.chance.choice(sorted(there))]

    def _connect(self, one: SimulatedConnector, door: _Door) -> None:
        if door.receiving.callers is None:
            return
        one.worker, one.session = door.process.worker, self.job.sessions()
        one.inbox.clear()
        one.sender.opened(200)
        door.sessions[one.session] = one
        door.receiving.table.opened(one.session)

    def _lose(self, one: SimulatedConnector) -> None:
        one.worker = None
        one.sender.lost()

    def _close(self, one: SimulatedConnector, door: _Door) -> None:
        one.closes -= 1
        if door.is_saving:
            self.job.meanwhile["closed"] += 1
        self._rest(one)
        self._leave(one, door)

    def _leave(self, one: SimulatedConnector, door: _Door) -> None:
        self._lose(one)
        if door.sessions.pop(one.session, None) is not None:
            door.receiving.closed(one.session)

    def _notify(self, one: SimulatedConnector, door: _Door, stream: Sent) -> None:
        if one.session in door.sessions:
            one.sender.asks(stream)
            self.job.tally["redirected"] += door.receiving.table.draining
            with door.process.acting():
                door.receiving.notify(one.session, stream.name)

    def _send_some(self, one: SimulatedConnector, door: _Door, stream: Sent) -> None:
        if one.session not in door.sessions:
            return
        if stream.at == one.messages - 1:
            door.receiving.offer(one.session, stream.name, stream.at, 0)
            one.sender.ended(stream)
            return
        end = min(one.messages, stream.at + 1 + self.chance.randint(1, 3))
        ids = list(range(stream.at + 1, end))
        blob = pack(ids, [b"%d" % id_ for id_ in ids], [int(TIMES[id_]) for id_ in ids])
        one.sender.sent(stream, ids[-1], len(blob))
        door.receiving.offer(one.session, stream.name, blob, len(blob))

    def _deliver(self, one: SimulatedConnector) -> None:
        session, what = one.inbox.popleft()
        if session != one.session or one.worker is None:
            return
        match what:
            case int():
                one.sender.granted_credits(what)
            case Restart():
                self._rest(one)
                self._lose(one)
            case Acknowledge(_, points):
                for name, por in points:
                    one.sender.acknowledged(one.sender.stream(name), por)
            case Answer(_, name, reason, por):
                stream = one.sender.stream(name)
                if reason is Reason.OK:
                    one.sender.granted(stream, por)
                elif reason is Reason.REDIRECT:
                    self._redirected(one)
                else:
                    self._rest(one)
                    one.sender.refused(stream)

    def _rest(self, one: SimulatedConnector) -> None:
        one.rests = self.steps + self.job.calm

    def _redirected(self, one: SimulatedConnector) -> None:
        self._rest(one)
        for process, door in list(self.doors.items()):
            if process.worker == one.worker:
                self._leave(one, door)
                return
        self._lose(one)


class FedJob:
    """A job, its disk, its sink and its connectors; deeds are done to it one after the other."""

    def __init__(
        self,
        seed: int,
        deeds: Sequence[str],
        workers: int = 2,
        connectors: int = 4,
        rivals: int = 0,
        messages: int = 60,
        closes: int = 2,
        full: float = FULL,
        every: float | None = None,
        long: int = LONG,
    ) -> None:
        self.chance = random.Random(seed)
        self.deeds = deque(deeds)
        self.workers = workers
        self.shelf = Shelf()
        self.disk = SimulatedDisk(seed)
        flow = Flow("fed")
        source = Connectors("feed", decode="message", event_time=True, secret=bytes(32))
        lateness_s = LATENESS / 1_000_000
        flow.source(source, lateness=lateness_s, name="in").sink(self.shelf, name="out")
        self.plan = flow.plan()
        self.messages = messages
        self.names = [f"s{number}" for number in range(connectors)]
        numbers = itertools.count(1)
        self.sessions = partial(next, numbers)
        # Each has a stream of its own. Rivals have all of theirs in common: they race for each, and one goes on
        # where the other stopped. That they ask for snapshots all the time is why not all are.
        self.connectors = [
            SimulatedConnector(
                number,
                self.names[:rivals] if number < rivals else self.names[number : number + 1],
                messages,
                closes,
            )
            for number in range(connectors)
        ]
        self.full, self.every, self.long = full, every, long
        self.calm = self.chance.choice(CALM)  # how many steps connectors rest that were sent away
        self.violation: Violation | None = None
        self.tally: Counter[str] = Counter()
        self.meanwhile: Counter[str] = Counter()  # since the snapshot under way began at a worker
        self.positions: Mapping[str, int] = {}  # of the snapshot committed last
        self.saved: dict[str, tuple[int, list[ConnectorMessage]]] = {}  # what is in it, by token

    def run(self) -> None:
        """From the first message to the last."""
        while not self._one_run():
            pass
        trouble = self._trouble(self.shelf.items(), whole=True)
        if trouble:
            raise Violation("output", trouble)

    def _one_run(self) -> bool:
        chosen = Snapshots("", every=self.every or self.chance.choice((2.0, 5.0)))
        keeper = _Keeper(self.plan, chosen, "fed", disk=self.disk)
        keeper.job = self
        self.meanwhile.clear()
        world = FedWorld(self, keeper)
        world.connectors = self.connectors
        pause = self.chance.randint(50, 250)
        for step in range(self.long):
            world.happen()
            if self.violation is not None:
                raise self.violation
            if step % 5 == 0:  # time passes, so snapshots are taken
                world.life_now += (
                    20_000 if any(connector.sends for connector in self.connectors) else 100_000
                )
                world.do(world.life.tick(world.life_now))
            if world.life.state in ("failed", "finished"):
                raise Violation("ended", f"the flow is {world.life.state}: {world.life.cause}")
            if self.deeds and step > pause and self._is_time(world):
                pause = step + self.chance.randint(50, 250)
                if self._do(world, self.deeds.popleft()):
                    self._close(world, keeper)
                    return False
            if not self.deeds and all(connector.done for connector in self.connectors):
                self._finish(world)
                self._close(world, keeper)
                return True
        raise Violation("stuck", f"not all was acknowledged within {self.long} steps")

    def _is_time(self, world: FedWorld) -> bool:
        """Whether the next deed may be done: some wait until the one before is through."""
        coordinator = world.life.coordinator
        if coordinator is None:
            return False
        through = coordinator.phase == "idle" and world.life.wanted is None
        return through or self.chance.random() < 0.001

    def _do(self, world: FedWorld, deed: str) -> bool:
        """One of the deeds; whether the controller is gone."""
        # If connectors always came back at once, snapshots would be asked for, and no worker leave with its streams.
        self.calm = self.chance.choice(CALM)
        what, _, much = deed.partition(" ")
        if what == "controller":
            return True
        if what == "crash":
            for worker in self.chance.sample(sorted(world.processes), int(much)):
                process = world.processes[worker]
                process.runtime = None
                world.gone(process, "killed")
            return False
        goal = world.life.wanted or world.life.placement
        if world.life.coordinator is not None and world.life.coordinator.target is not None:
            goal = world.life.wanted or world.life.coordinator.target
        size = len(goal.workers) + int(much) * (1 if what == "grow" else -1)
        world.do(world.life.scale(goal.resized(range(max(1, size))), world.life_now))
        self.workers = max(1, size)
        return False

    def _finish(self, world: FedWorld) -> None:
        """All is acknowledged: what is committed is shown."""
        self.full = 0
        world.do(world.life.stop(world.life_now))
        for _ in range(LONG):
            if self.violation is not None:
                raise self.violation
            if world.life.gone:
                return
            world.happen()
        raise Violation("stuck", "the flow does not stop")

    def _close(self, world: FedWorld, keeper: Storekeeper) -> None:
        world.connectors = ()
        for connector in self.connectors:
            connector.worker, connector.rests = None, 0
            connector.sender.lost()
        keeper.close()

    # ------------------------------------------------------------ what must hold

    def wrong(self, kind: str, text: str) -> None:
        """Something is; a worker would take it for a failure of its own if it were raised there."""
        self.violation = self.violation or Violation(kind, text)

    def committed(self, manifest: Manifest) -> None:
        """A snapshot is committed: what is in it."""
        self.tally["committed"] += 1
        self.tally["ended, then committed"] += self.meanwhile["ended"]
        self.meanwhile.clear()
        self.positions = manifest.streams.get("in", {})
        pieces = self.shelf.shown | self.shelf.prepared
        self.saved |= {part.token: pieces[part.token] for part in manifest.sinks}
        rows = in_order(self.saved.values())
        held = Counter(row.stream for row in rows)
        said = Counter({name: por + 1 for name, por in self.positions.items()})
        trouble = self._trouble(rows, whole=False)
        if trouble or held != said:
            what = trouble or f"it says {dict(said)} messages, and holds {dict(held)}"
            self.wrong("not a prefix", f"snapshot {manifest.snapshot}: {what}")

    def judged(self, judge: Callable[[RowBatch, int], int], batch: RowBatch, reached: int) -> int:
        """Look at which messages a worker takes for late."""
        after = judge(batch, reached)
        bounds = [MIN] * len(batch) if batch.late is None else batch.late.tolist()
        for message, bound in zip(batch.values, bounds, strict=True):
            self.tally["late"] += bound > MIN
            if bound != BOUNDS[message.id]:
                text = f"message {message.id} of {message.stream} is judged by {bound}, not {BOUNDS[message.id]}"
                self.wrong("lateness", text)
        return after

    def given_up(self) -> None:
        """A snapshot will not be committed."""
        self.tally["given up"] += 1
        self.tally["ended, then given up"] += self.meanwhile["ended"]
        self.tally["closed, then given up"] += self.meanwhile["closed"]
        self.meanwhile.clear()

    def acknowledged(self, points: Iterable[tuple[str, int]]) -> None:
        """A connector is told that messages are safe."""
        for name, por in points:
            if por > self.positions.get(name, NONE):
                self.wrong("untrue", f"{name} is acknowledged up to {por}: {self.positions}")

    def _trouble(self, rows: Iterable[ConnectorMessage], *, whole: bool) -> str:
        wanted = {name: [b"%d" % number for number in range(self.messages)] for name in self.names}
        return check_streams([(row.stream, row.payload) for row in rows], wanted, whole=whole)


def simulate(
    seed: int, deeds: Sequence[str], rules: Rules | None = None, **more: Any
) -> Counter[str]:
    """One job: how often what came about; raises `Violation` if it is not as it should be."""
    rules = rules or Rules()
    job = FedJob(seed, deeds, **more)
    with patched([(receiving, "Table", rules.table), (feeds, "Registry", rules.registry)]):
        job.run()
    return job.tally
