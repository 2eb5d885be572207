"""A flow that connectors feed, simulated: workers with the production runtime, and chance decides what happens next.

A job is a chain of worlds on one disk, as in `crashes`. Connectors (with the production `Sender`) connect to any
worker, announce streams, send, lose their connections and come back, to the same worker or another. Meanwhile a *plan
of deeds* is carried out: the flow grows or shrinks, a worker is lost, the controller is lost. In the end all streams
must be sent and acknowledged, and what the sink has shown is the input: no loss, nothing twice, in order.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from railgun.connectors.pushed import ConnectorMessage, Connectors
from railgun.controller.storekeeper import Snapshots, Storekeeper
from railgun.core.placement import Worker
from railgun.core.sources.messages import (
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
from railgun.core.sources.sender import Phase, Sender, Sent
from railgun.flow.flow import Flow
from railgun.flow.operators.receiving import Receiving
from railgun.flow.sink import Place, Token, TwoPhaseSink, TwoPhaseWriter
from railgun.testing.disks import SimulatedDisk
from railgun.testing.model import Violation
from railgun.testing.validator import check_streams
from railgun.testing.world import Process, World
from railgun.wire import control
from railgun.wire.outside import pack

NOW: Final = 1_700_000_000_000_000
LONG: Final = 60_000  # steps; a job left in peace is through long before
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
        pieces = sorted(self.shown.values(), key=lambda piece: piece[0])
        return [item for _, items in pieces for item in items]


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
    inbox: deque[tuple[int, Any]] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        """Whether all it has is acknowledged."""
        return all(self.sender.stream(s).acked == self.messages - 1 for s in self.streams)


class _Door:
    """What stands for `worker.door` here."""

    def __init__(self, world: FedWorld, process: Process, receiving: Receiving) -> None:
        self.world, self.process, self.receiving = world, process, receiving
        self.sessions: dict[int, SimulatedConnector] = {}
        receiving.callers = self

    def carry_out(self, command: FromTable) -> None:
        runtime = self.process.runtime
        assert runtime is not None
        generation, step = runtime.generation, self.receiving.step
        match command:
            case Answer(session) | Acknowledge(session):
                self._say(session, command)
            case Restart(session):
                self._say(session, command)
                self.sessions.pop(session, None)
            case Ask(stream, session):
                self.process.tell(control.Asked(generation, step, stream, session))
            case Relinquish(stream, por):
                self.process.tell(control.Relinquished(generation, step, stream, por))
            case Hasten():
                self.process.tell(control.Hastened(generation))

    def _say(self, session: int, what: Any) -> None:
        if session in self.sessions:
            self.world.activity += 1
            self.sessions[session].inbox.append((session, what))

    def took(self, session: int, size: int) -> None:
        self._say(session, size)

    def refuse(self, session: int, error: SessionError) -> None:
        raise Violation("refused", f"a connector that keeps the rules: {error}")

    def let_go(self) -> None:
        for session in list(self.sessions):
            self._say(session, Restart(session))
        self.sessions = {}
        self.world.doors.pop(self.process, None)


class FedWorld(World):
    """A world with connectors."""

    connectors: Sequence[SimulatedConnector] = ()
    sessions: Callable[[], int]

    def __init__(self, *given: Any, **more: Any) -> None:
        self.doors: dict[Process, _Door] = {}
        super().__init__(*given, **more)

    def begun(self, process: Process) -> None:
        """A worker listens."""
        assert process.runtime is not None
        for receiving in process.runtime.receiving():
            self.doors[process] = _Door(self, process, receiving)

    def told_of_stream(self, process: Process, order: control.Streams) -> None:
        """As the door of a worker does it."""
        receiving = self.doors[process].receiving
        match order:
            case control.Granted(_, _, stream, session, por):
                receiving.granted(stream, session, por)
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

    def happen(self) -> bool:
        """As before; but connectors always have something to do, so workers have to be given their turns."""
        if self.processes and self.chance.random() < 0.3:
            self._work(self.chance.choice(sorted(self.processes)))
            return True
        return super().happen()

    def _things(self) -> list[Callable[[], None]]:
        return [*super()._things(), *self._fed_things()]

    def _fed_things(self) -> list[Callable[[], None]]:
        there = {process.worker: door for process, door in self.doors.items()}
        things: list[Callable[[], None]] = []
        for one in self.connectors:
            if one.inbox:
                things.append(partial(self._deliver, one))
            if one.worker is not None and one.worker not in there:
                things.append(partial(self._lose, one))
            elif one.worker is None:
                if not one.done:
                    things += [partial(self._connect, one, door) for door in there.values()]
            else:
                things += self._session_things(one, there[one.worker])
        return things

    def _session_things(self, one: SimulatedConnector, door: _Door) -> list[Callable[[], None]]:
        things: list[Callable[[], None]] = []
        for name in one.streams:
            stream = one.sender.stream(name)
            if stream.phase is Phase.IDLE and stream.acked < one.messages - 1:
                things.append(partial(self._notify, one, door, stream))
            elif one.sender.may_send(stream):
                things.append(partial(self._send_some, one, door, stream))
        if one.closes and self.chance.random() < 0.02:
            things.append(partial(self._close, one, door))
        return things

    def _connect(self, one: SimulatedConnector, door: _Door) -> None:
        if door.receiving.table.draining or door.receiving.callers is None:
            return
        one.worker, one.session = door.process.worker, self.sessions()
        one.inbox.clear()
        one.sender.opened(200)
        door.sessions[one.session] = one
        door.receiving.table.opened(one.session)

    def _lose(self, one: SimulatedConnector) -> None:
        one.worker = None
        one.sender.lost()

    def _close(self, one: SimulatedConnector, door: _Door) -> None:
        one.closes -= 1
        self._lose(one)
        if door.sessions.pop(one.session, None) is not None:
            door.receiving.closed(one.session)

    def _notify(self, one: SimulatedConnector, door: _Door, stream: Sent) -> None:
        if one.session in door.sessions:
            one.sender.asks(stream)
            with door.process.acting():
                door.receiving.notify(one.session, stream.name)

    def _send_some(self, one: SimulatedConnector, door: _Door, stream: Sent) -> None:
        if one.session not in door.sessions:
            return
        if stream.at == one.messages - 1:
            door.receiving.offer(one.session, stream.name, stream.at, 0)
            one.sender.ended(stream)
            return
        end = min(one.messages, stream.at + 1 + self.chance.randint(1, 4))
        ids = list(range(stream.at + 1, end))
        blob = pack(ids, [b"%d" % id_ for id_ in ids])
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
                self._lose(one)
            case Acknowledge(_, points):
                for name, por in points:
                    one.sender.acknowledged(one.sender.stream(name), por)
            case Answer(_, name, reason, por):
                stream = one.sender.stream(name)
                if reason is Reason.OK:
                    one.sender.granted(stream, por)
                else:
                    one.sender.refused(stream)


class FedJob:
    """A job, its disk, its sink and its connectors; deeds are done to it one after the other."""

    def __init__(
        self,
        seed: int,
        deeds: Sequence[str],
        workers: int = 2,
        connectors: int = 2,
        streams: int = 2,
        messages: int = 30,
        closes: int = 2,
    ) -> None:
        self.chance = random.Random(seed)
        self.deeds = deque(deeds)
        self.workers = workers
        self.shelf = Shelf()
        self.disk = SimulatedDisk(seed)
        flow = Flow("fed")
        source = Connectors("feed", decode="message", secret=bytes(32))
        flow.source(source, name="in").sink(self.shelf, name="out")
        self.plan = flow.plan()
        self.messages = messages
        self.names = [f"s{number}" for number in range(streams)]
        numbers = itertools.count(1)
        self.sessions = partial(next, numbers)
        # Streams are shared: two connectors race for each, and one goes on where the other stopped.
        self.connectors = [
            SimulatedConnector(number, self.names, messages, closes) for number in range(connectors)
        ]
        self.generations = 0

    def run(self) -> None:
        """From the first message to the last."""
        while not self._one_run():
            pass
        self._check(whole=True)

    def _one_run(self) -> bool:
        chosen = Snapshots("", every=self.chance.choice((2.0, 5.0)))
        keeper = Storekeeper(self.plan, chosen, "fed", disk=self.disk)
        world = FedWorld(self.plan, self.workers, self.chance, NOW, keeper, forgiving=True)
        world.connectors, world.sessions = self.connectors, self.sessions
        pause = self.chance.randint(50, 400)
        for step in range(LONG):
            world.happen()
            if step % 5 == 0:  # time passes, so snapshots are taken
                world.life_now += 20_000
                world.do(world.life.tick(world.life_now))
            if world.life.state in ("failed", "finished"):
                raise Violation("ended", f"the flow is {world.life.state}: {world.life.cause}")
            if self.deeds and step > pause and world.life.coordinator is not None:
                pause = step + self.chance.randint(50, 400)
                if self._do(world, self.deeds.popleft()):
                    self._close(world, keeper)
                    return False
            if not self.deeds and all(one.done for one in self.connectors):
                self._finish(world)
                self._close(world, keeper)
                return True
        raise Violation("stuck", f"not all was acknowledged within {LONG} steps")

    def _do(self, world: FedWorld, deed: str) -> bool:
        """One of the deeds; whether the controller is gone."""
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
        world.do(world.life.stop(world.life_now))
        for _ in range(LONG):
            if world.life.gone:
                return
            world.happen()
        raise Violation("stuck", "the flow does not stop")

    def _close(self, world: FedWorld, keeper: Storekeeper) -> None:
        world.connectors = ()
        for one in self.connectors:
            one.worker = None
            one.sender.lost()
        keeper.close()
        self._check(whole=False)

    def _check(self, *, whole: bool) -> None:
        """What is shown and acknowledged."""
        rows: list[ConnectorMessage] = self.shelf.items()
        shown = [(row.stream, row.payload) for row in rows]
        wanted = {name: [b"%d" % number for number in range(self.messages)] for name in self.names}
        if whole:
            trouble = check_streams(shown, wanted, whole=True)
            if trouble:
                raise Violation("output", trouble)
            for one in self.connectors:
                if any(one.sender.stream(name).acked == NONE for name in self.names):
                    raise Violation("acks", "not all is acknowledged")


def simulate(seed: int, deeds: Sequence[str], **more: Any) -> None:
    """One job; raises `Violation` if it is not as it should be."""
    FedJob(seed, deeds, **more).run()
