"""Simulate a flow with connectors: workers with the production runtime, and a random order of events.

A job is a chain of worlds on one disk, as in `crashes`. Connectors (with the production `Sender`) connect to any
worker, announce streams, send, lose their connections and come back, to the same worker or another. Meanwhile a *plan
of deeds* is carried out: the flow grows or shrinks, a worker is lost, the controller is lost. Now and then the disk is
full, so snapshots are given up. What must hold:

1. **Every committed snapshot** holds the first messages of each stream, each once and in order, and exactly those up to
   the position that its manifest records.
2. **Acknowledged messages** are in the last committed snapshot when they are acknowledged.
3. **The end.** All streams come to it, all messages are acknowledged, and the sink has shown exactly the input.
4. **Late** messages are the same as if one worker read each stream from its beginning.

Connectors prefer the workers that will leave, and go also to one that drains: rare events are the point. The job's
`tally` counts them, so that a test can require them.
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
MAX_STEPS: Final = 60_000  # an undisturbed job ends long before
REST_STEPS: Final = (0, 400, 400)  # how long a connector rests that was sent away
FULL: Final = 0.15  # how often the disk is full
LAST: Final = 0.85  # how often a connector goes to the worker that would leave first
LATENESS: Final = 5_000_000
TIMES: Final = NOW + 1_000_000 * (
    np.arange(10_000) + np.arange(10_000) * 7 % 20
)  # of messages, by their ids
BOUNDS: Final = np.asarray(late_rows(TIMES, MIN, LATENESS)[0]).tolist()
DEEDS: Final = ("grow 1", "grow 4", "shrink 1", "shrink 4", "crash 1", "crash 2", "controller")


class Shelf(TwoPhaseSink[Any]):
    """A two-phase sink that outlives all workers, and remembers the snapshot with which each item was shown."""

    def __init__(self) -> None:
        self.prepared: dict[str, tuple[int, list[Any]]] = {}
        self.shown: dict[str, tuple[int, list[Any]]] = {}
        self.numbers = itertools.count()

    def open(self, place: Place) -> TwoPhaseWriter[Any]:
        """Return the writer of one worker."""
        return _ShelfWriter(self, place)

    def commit(self, token: Token) -> None:
        """Show the items of a token, once."""
        if token not in self.shown:
            self.shown[token] = self.prepared.pop(token)

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        """Commit these tokens, and forget all others."""
        for token in tokens:
            self.commit(token)
        self.prepared = {}

    def items(self) -> list[Any]:
        """Return the shown items, in the order of snapshots."""
        return in_order(self.shown.values())


def in_order(pieces: Iterable[tuple[int, list[Any]]]) -> list[Any]:
    """Return the items of pieces, in the order of their snapshots."""
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
    """A connector; messages of workers wait in its `inbox`."""

    number: int
    streams: Sequence[str]
    messages: int
    closes: int
    sender: Sender = field(default_factory=Sender)
    worker: Worker | None = None
    session: int = 0
    rests: int = 0  # until this step: a connector that was sent away tries again later
    inbox: deque[tuple[int, Any]] = field(default_factory=deque)

    @property
    def sends(self) -> bool:
        """Return whether the connector has unsent messages."""
        return any(self.sender.stream(s).at < self.messages - 1 for s in self.streams)

    @property
    def done(self) -> bool:
        """Return whether all its messages are acknowledged."""
        return all(self.sender.stream(s).acked == self.messages - 1 for s in self.streams)


class _Listener:
    """Stands in for `engine.worker.ingest_listener`."""

    def __init__(self, world: IngestWorld, process: Process, receiving: Receiving) -> None:
        self.world, self.process, self.receiving = world, process, receiving
        self.sessions: dict[int, SimulatedConnector] = {}
        receiving.callers = self

    @property
    def closing(self) -> int:
        """Return how many streams have come to their end."""
        entries = self.receiving.table.entries.values()
        return sum(entry.state is State.CLOSING for entry in entries)

    @property
    def is_saving(self) -> bool:
        """Return whether a snapshot has begun at this worker and is not settled."""
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
        self.world.listeners.pop(self.process, None)


class _Keeper(Storekeeper):
    """The production storekeeper; every committed snapshot is checked."""

    job: IngestJob

    def written(self) -> None:
        super().written()
        assert self.manifest is not None
        self.job.committed(self.manifest)

    def give_up(self, order: o.GiveUp) -> None:
        super().give_up(order)
        self.job.given_up()


class IngestWorld(World):
    """A world with connectors."""

    connectors: Sequence[SimulatedConnector] = ()

    def __init__(self, job: IngestJob, keeper: Storekeeper) -> None:
        self.listeners: dict[Process, _Listener] = {}
        self.job = job
        self.steps = 0
        super().__init__(job.plan, job.workers, job.chance, NOW, keeper, report_errors=True)

    def begun(self, process: Process) -> None:
        """Let a worker listen."""
        assert process.runtime is not None
        for inlet in process.runtime.receiving():
            self.listeners[process] = _Listener(self, process, inlet)
            judge = partial(self.job.judged, inlet.judge)
            setattr(inlet, "judge", judge)  # noqa: B010  (mypy takes no assignment to a method)

    def on_stream_order(self, process: Process, order: control.Streams) -> None:
        """Handle an order about streams as the listener of a worker does."""
        receiving = self.listeners[process].receiving
        match order:
            case control.Granted(_, _, stream, session, por, reached):
                receiving.granted(stream, session, por, reached)
            case control.Rejected(_, _, stream, session):
                receiving.rejected(stream, session)
            case control.Wanted(_, _, stream):
                receiving.wanted(stream)

    def gone(self, process: Process, why: str) -> None:
        """Handle the end of a process, and with it of its connections."""
        listener = self.listeners.pop(process, None)
        if listener is not None:
            listener.let_go()
        super().gone(process, why)

    def hear(self, process: Process) -> None:
        """Handle a message as `super` does, and count what leaving workers hand over."""
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
        listener = next((d for p, d in self.listeners.items() if p.worker == worker), None)
        before = 0 if listener is None else listener.closing
        worked = super()._work(worker)
        if listener is not None and listener.closing > before and listener.is_saving:
            self.job.meanwhile["ended"] += 1
        return worked

    def happen(self) -> bool:
        """Let one thing happen; connectors always have work, so workers are given their turns."""
        self.steps += 1
        if self.processes and self.chance.random() < 0.3:
            self._work(self.chance.choice(sorted(self.processes)))
            return True
        return super().happen()

    def _possible_events(self) -> list[Callable[[], None]]:
        return [*super()._possible_events(), *self._fed_things()]

    def _fed_things(self) -> list[Callable[[], None]]:
        there = {process.worker: listener for process, listener in self.listeners.items()}
        things: list[Callable[[], None]] = []
        for connector in self.connectors:
            if connector.inbox:
                things.append(partial(self._deliver, connector))
            if connector.worker is not None and connector.worker not in there:
                things.append(partial(self._lose, connector))
            elif connector.worker is None:
                if there and not connector.done and connector.rests <= self.steps:
                    things.append(partial(self._connect, connector, self._some_listener(there)))
            else:
                things += self._session_things(connector, there[connector.worker])
        return things

    def _session_things(
        self, connector: SimulatedConnector, listener: _Listener
    ) -> list[Callable[[], None]]:
        things: list[Callable[[], None]] = []
        for name in connector.streams:
            stream = connector.sender.stream(name)
            if stream.phase is Phase.IDLE and stream.acked < connector.messages - 1:
                if connector.rests <= self.steps:
                    things.append(partial(self._notify, connector, listener, stream))
            elif connector.sender.may_send(stream):
                things.append(partial(self._send_some, connector, listener, stream))
        if connector.closes and self.chance.random() < 0.02:
            things.append(partial(self._close, connector, listener))
        return things

    def _some_listener(self, there: Mapping[Worker, _Listener]) -> _Listener:
        last = self.chance.random() < LAST
        return there[max(there) if last else self.chance.choice(sorted(there))]

    def _connect(self, connector: SimulatedConnector, listener: _Listener) -> None:
        if listener.receiving.callers is None:
            return
        connector.worker, connector.session = listener.process.worker, self.job.sessions()
        connector.inbox.clear()
        connector.sender.opened(200)
        listener.sessions[connector.session] = connector
        listener.receiving.table.opened(connector.session)

    def _lose(self, connector: SimulatedConnector) -> None:
        connector.worker = None
        connector.sender.lost()

    def _close(self, connector: SimulatedConnector, listener: _Listener) -> None:
        connector.closes -= 1
        if listener.is_saving:
            self.job.meanwhile["closed"] += 1
        self._rest(connector)
        self._leave(connector, listener)

    def _leave(self, connector: SimulatedConnector, listener: _Listener) -> None:
        self._lose(connector)
        if listener.sessions.pop(connector.session, None) is not None:
            listener.receiving.closed(connector.session)

    def _notify(self, connector: SimulatedConnector, listener: _Listener, stream: Sent) -> None:
        if connector.session in listener.sessions:
            connector.sender.asks(stream)
            self.job.tally["redirected"] += listener.receiving.table.draining
            with listener.process.acting():
                listener.receiving.notify(connector.session, stream.name)

    def _send_some(self, connector: SimulatedConnector, listener: _Listener, stream: Sent) -> None:
        if connector.session not in listener.sessions:
            return
        if stream.at == connector.messages - 1:
            listener.receiving.offer(connector.session, stream.name, stream.at, 0)
            connector.sender.ended(stream)
            return
        end = min(connector.messages, stream.at + 1 + self.chance.randint(1, 3))
        ids = list(range(stream.at + 1, end))
        blob = pack(ids, [b"%d" % id_ for id_ in ids], [int(TIMES[id_]) for id_ in ids])
        connector.sender.sent(stream, ids[-1], len(blob))
        listener.receiving.offer(connector.session, stream.name, blob, len(blob))

    def _deliver(self, connector: SimulatedConnector) -> None:
        session, what = connector.inbox.popleft()
        if session != connector.session or connector.worker is None:
            return
        match what:
            case int():
                connector.sender.granted_credits(what)
            case Restart():
                self._rest(connector)
                self._lose(connector)
            case Acknowledge(_, points):
                for name, por in points:
                    connector.sender.acknowledged(connector.sender.stream(name), por)
            case Answer(_, name, reason, por):
                stream = connector.sender.stream(name)
                if reason is Reason.OK:
                    connector.sender.granted(stream, por)
                elif reason is Reason.REDIRECT:
                    self._redirected(connector)
                else:
                    self._rest(connector)
                    connector.sender.refused(stream)

    def _rest(self, connector: SimulatedConnector) -> None:
        connector.rests = self.steps + self.job.calm

    def _redirected(self, connector: SimulatedConnector) -> None:
        self._rest(connector)
        for process, listener in list(self.listeners.items()):
            if process.worker == connector.worker:
                self._leave(connector, listener)
                return
        self._lose(connector)


class IngestJob:
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
        long: int = MAX_STEPS,
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
        # Each connector has a stream of its own. Rivals share all streams: they race for each, and one continues
        # where the other stopped. Rivals ask for snapshots all the time, so not all connectors are rivals.
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
        self.calm = self.chance.choice(
            REST_STEPS
        )  # for how many steps connectors rest that were sent away
        self.violation: Violation | None = None
        self.tally: Counter[str] = Counter()
        self.meanwhile: Counter[str] = (
            Counter()
        )  # counts since the current snapshot began at a worker
        self.positions: Mapping[str, int] = {}  # positions of the last committed snapshot
        self.saved: dict[str, tuple[int, list[ConnectorMessage]]] = {}  # its content, by token

    def run(self) -> None:
        """Run from the first message to the last."""
        while not self._one_run():
            pass
        error_text = self._difference(self.shelf.items(), whole=True)
        if error_text:
            raise Violation("output", error_text)

    def _one_run(self) -> bool:
        chosen = Snapshots("", every=self.every or self.chance.choice((2.0, 5.0)))
        keeper = _Keeper(self.plan, chosen, "fed", disk=self.disk)
        keeper.job = self
        self.meanwhile.clear()
        world = IngestWorld(self, keeper)
        world.connectors = self.connectors
        pause = self.chance.randint(50, 250)
        for step in range(self.long):
            world.happen()
            if self.violation is not None:
                raise self.violation
            if step % 5 == 0:  # time passes, so that snapshots are taken
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

    def _is_time(self, world: IngestWorld) -> bool:
        """Return whether the next deed may be done: some wait until the deed before is finished."""
        coordinator = world.life.coordinator
        if coordinator is None:
            return False
        through = coordinator.phase == "idle" and world.life.wanted is None
        return through or self.chance.random() < 0.001

    def _do(self, world: IngestWorld, deed: str) -> bool:
        """Do one of the deeds; return whether the controller is gone."""
        # If connectors always came back at once, they would request snapshots: no worker would leave with streams.
        self.calm = self.chance.choice(REST_STEPS)
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

    def _finish(self, world: IngestWorld) -> None:
        """Check the end: all is acknowledged, and all committed output is shown."""
        self.full = 0
        world.do(world.life.stop(world.life_now))
        for _ in range(MAX_STEPS):
            if self.violation is not None:
                raise self.violation
            if world.life.gone:
                return
            world.happen()
        raise Violation("stuck", "the flow does not stop")

    def _close(self, world: IngestWorld, keeper: Storekeeper) -> None:
        world.connectors = ()
        for connector in self.connectors:
            connector.worker, connector.rests = None, 0
            connector.sender.lost()
        keeper.close()

    # ------------------------------------------------------------ checks

    def wrong(self, kind: str, text: str) -> None:
        """Record a violation; raised in a worker, it would count as a failure of the worker."""
        self.violation = self.violation or Violation(kind, text)

    def committed(self, manifest: Manifest) -> None:
        """Check a committed snapshot."""
        self.tally["committed"] += 1
        self.tally["ended, then committed"] += self.meanwhile["ended"]
        self.meanwhile.clear()
        self.positions = manifest.streams.get("in", {})
        pieces = self.shelf.shown | self.shelf.prepared
        self.saved |= {part.token: pieces[part.token] for part in manifest.sinks}
        rows = in_order(self.saved.values())
        held = Counter(row.stream for row in rows)
        recorded = Counter({name: por + 1 for name, por in self.positions.items()})
        error_text = self._difference(rows, whole=False)
        if error_text or held != recorded:
            what = error_text or f"it says {dict(recorded)} messages, and holds {dict(held)}"
            self.wrong("not a prefix", f"snapshot {manifest.snapshot}: {what}")

    def judged(self, judge: Callable[[RowBatch, int], int], batch: RowBatch, reached: int) -> int:
        """Check which messages a worker counts as late."""
        after = judge(batch, reached)
        bounds = [MIN] * len(batch) if batch.late is None else batch.late.tolist()
        for message, bound in zip(batch.values, bounds, strict=True):
            self.tally["late"] += bound > MIN
            if bound != BOUNDS[message.id]:
                text = f"message {message.id} of {message.stream} is judged by {bound}, not {BOUNDS[message.id]}"
                self.wrong("lateness", text)
        return after

    def given_up(self) -> None:
        """Handle a snapshot that will not be committed."""
        self.tally["given up"] += 1
        self.tally["ended, then given up"] += self.meanwhile["ended"]
        self.tally["closed, then given up"] += self.meanwhile["closed"]
        self.meanwhile.clear()

    def acknowledged(self, points: Iterable[tuple[str, int]]) -> None:
        """Check messages that a connector is told to be safe."""
        for name, por in points:
            if por > self.positions.get(name, NONE):
                self.wrong("untrue", f"{name} is acknowledged up to {por}: {self.positions}")

    def _difference(self, rows: Iterable[ConnectorMessage], *, whole: bool) -> str:
        wanted = {name: [b"%d" % number for number in range(self.messages)] for name in self.names}
        return check_streams([(row.stream, row.payload) for row in rows], wanted, whole=whole)


def simulate(
    seed: int, deeds: Sequence[str], rules: Rules | None = None, **more: Any
) -> Counter[str]:
    """Simulate one job; return the counts of events. Raises `Violation`."""
    rules = rules or Rules()
    job = IngestJob(seed, deeds, **more)
    with patched([(receiving, "Table", rules.table), (feeds, "Registry", rules.registry)]):
        job.run()
    return job.tally
