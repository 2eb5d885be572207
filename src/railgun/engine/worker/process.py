"""Run a worker's process: one thread with an event loop, around a `Runtime`.

- It has one connection to the controller. When that closes, the process ends, because it gets no more orders.
- It has one authenticated link to every other worker, which carries the messages of all stages, in order.
- Links are always read; when there is too much to do, the sources pause. A worker whose outgoing queues exceed a limit
  tells all workers (`Pressure`), and no source of the flow is read until it has sent enough of them. So a mesh of links
  cannot deadlock, and no queue grows without bound.
- Keys move only while little state of other keys is in transit, in our queues and the system's, because records must
  not wait behind a large amount of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from railgun.engine.operators.calls import Call, Unpickling, attempt
from railgun.engine.protocol.lifecycle import messages as orders
from railgun.engine.protocol.placement import Worker
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.snapshots.errors import SnapshotError
from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.worker import control_messages as control
from railgun.engine.worker.breadcrumb import Breadcrumb, left_behind
from railgun.engine.worker.frames import FrameReader, Pressure, Taken, encode
from railgun.engine.worker.ingest_listener import IngestListener
from railgun.engine.worker.liveness import UNPICKLE_FLOW, Pulse
from railgun.engine.worker.loading import load_parts
from railgun.engine.worker.parent_watchdog import ParentWatchdog
from railgun.engine.worker.runtime import Environment, Runtime
from railgun.engine.worker.saver import Then, Work
from railgun.engine.worker.spec import WorkerSpec
from railgun.engine.worker.state_queries import look
from railgun.errors import RailgunError, pass_interrupt
from railgun.flows.errors import InterruptedCallError, StepError, is_permanent
from railgun.flows.plan import Plan
from railgun.storage.errors import StorageError
from railgun.transport.columns import encode_column
from railgun.transport.connection import Connection, Gate, Messages
from railgun.transport.hello import HelloError
from railgun.transport.listener import Listener
from railgun.transport.pickling import adopt_classes

HIGH_BYTES: Final = 4 << 20  # unsent bytes at which sources pause
LOW_BYTES: Final = 1 << 20  # unsent bytes at which they go on
SOCKET_BUFFER_BYTES: Final = 256 << 10  # of a link on each side; the system would buffer megabytes
SMALL_FRAME_BYTES: Final = 16 << 10  # smaller frames are sent together
# No more keys are moved to a worker while more state than this is in transit to it.
MAX_MOVING_BYTES: Final = 128 << 10
# In place of HIGH_BYTES while keys move, so that there is room for their state.
HIGH_MOVING_BYTES: Final = 4 * MAX_MOVING_BYTES
CAREFUL_S: Final = 300.0  # for which each record is noted, after a worker was lost
BEAT_S: Final = (0.1, 0.5)  # between heartbeats: while keys move, and otherwise


class ControllerGoneError(RailgunError):
    """The connection to the controller closed, or could not be opened."""


def run_worker(spec: WorkerSpec) -> None:
    """Run a worker until the controller stops it. Raises if it ends in any other way."""
    # `asyncio.run` would also make the loop the one that `asyncio.get_event_loop` gives to user code.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(_Process(spec).run())


def microseconds() -> int:
    """Return the present time (µs)."""
    return time.time_ns() // 1000


class _Links:
    """The links to other workers in one generation."""

    def __init__(self, process: _Process, generation: int) -> None:
        self.process = process
        self.generation = generation
        self.open: dict[Worker, Connection] = {}
        self.readers: dict[Connection, FrameReader] = {}
        self.early_data: list[tuple[Connection, bytes]] = []  # received before the stages were made
        self.overloaded: set[Worker] = set()  # workers that reported too much to do
        self.closing = False
        self.moving: dict[Worker, int] = {}  # bytes of state in transit to each
        self.small_frames: dict[Connection, list[bytes]] = {}  # waiting to be sent together

    @property
    def unsent(self) -> int:
        return max((link.unsent for link in self.open.values()), default=0)

    def has_room(self) -> bool:
        """Return whether keys may move: little is in transit, so records behind them do not wait long."""
        return (
            self.unsent <= MAX_MOVING_BYTES
            and max(self.moving.values(), default=0) <= MAX_MOVING_BYTES
        )

    def send(self, to: Worker, data: bytes) -> None:
        """Send a frame; small frames are sent together at the end of the loop's iteration."""
        link = self.open[to]
        if len(data) >= SMALL_FRAME_BYTES:
            self._flush_box(link)
            link.send(data)
            return
        if not self.small_frames:
            self.process.loop.call_soon(self._flush_all)
        self.small_frames.setdefault(link, []).append(data)

    def _flush_all(self) -> None:
        for link in list(self.small_frames):
            self._flush_box(link)

    def _flush_box(self, link: Connection) -> None:
        box = self.small_frames.pop(link, None)
        if box is not None:
            link.send(b"".join(box))

    def add(self, worker: Worker, link: Connection) -> None:
        if worker in self.open:
            raise HelloError(f"worker {worker} has a link already")
        channel = link.transport.get_extra_info("socket")
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            channel.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BUFFER_BYTES)
        self.open[worker] = link
        self.readers[link] = FrameReader(unpickling=self.process.unpickling)
        link.tag = (self, worker)

    def close(self) -> None:
        self._flush_all()
        self.closing = True
        for link in self.open.values():
            link.close()


class _Process:
    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.plan: Plan | None = None
        self.watchdog: ParentWatchdog | None = None
        self.pulse: Pulse | None = None
        self.runtime: Runtime | None = None
        self.links: dict[int, _Links] = {}  # by generation
        self.start: orders.Start | None = None
        self.store: SnapshotStore | None = None
        self.load = control.Load(-1, (), ())
        self.joins: list[orders.Tell] = []
        self.under_pressure = False
        self.reported_end = False
        self.done: asyncio.Future[None]
        self.controller: Connection
        self.messages = Messages()
        self._pumping: asyncio.Handle | None = None
        self._flushing = False
        self.loading = False  # whether a generation's state is being loaded
        self.threads = ThreadPoolExecutor(1, "railgun-saving")
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ingest_listeners: dict[str, IngestListener] = {}  # by step
        self.host: str
        self.breadcrumb: Breadcrumb | None = None

    async def run(self) -> None:
        loop = self.loop = asyncio.get_running_loop()
        self.done = loop.create_future()
        keep_memory()
        self.breadcrumb = Breadcrumb.make(self.spec)
        host = self.host = _own_address(self.spec.host)
        listener = Listener(self._accept, Gate())
        port = await listener.open(host, 0)
        who = {
            "worker": self.spec.worker, "incarnation": self.spec.incarnation,
            "pid": os.getpid(), "host": host, "port": port, "machine": socket.gethostname(),
            **(self.breadcrumb.location() if self.breadcrumb is not None else {}),
        }  # fmt: skip
        secret = self.spec.secret
        try:
            await loop.create_connection(
                lambda: Connection(secret, self._connected, self._ordered, self._disconnected, who),
                self.spec.host,
                self.spec.port,
            )
        except OSError as error:
            raise ControllerGoneError(
                f"no controller at {self.spec.host}:{self.spec.port}: {error}"
            ) from error
        try:
            await self.done
        finally:
            listener.stop()
            for task in self._tasks:
                task.cancel()
            for links in self.links.values():
                links.close()
            if self.runtime is not None:
                self.runtime.close()
            for ingest_listener in self.ingest_listeners.values():
                await ingest_listener.close()
            await listener.close()
            self.threads.shutdown(wait=False, cancel_futures=True)
            if self.watchdog is not None:
                self.watchdog.release()
            if self.pulse is not None:
                self.pulse.stop()
            if self.breadcrumb is not None:
                self.breadcrumb.remove()

    # ------------------------------------------------------------ the controller

    def _connected(self, connection: Connection) -> None:
        self.controller = connection
        self.watchdog = ParentWatchdog(connection.transport.get_extra_info("socket").fileno())
        self.pulse = Pulse(self.spec)
        self.loop.call_later(BEAT_S[0], self._beat)
        for lost in left_behind(self.spec):
            self._tell(control.LeftBehind(*lost))

    def _disconnected(self, connection: Connection, error: Exception | None) -> None:
        if not self.done.done():
            why = f": {error}" if error else ""
            self.done.set_exception(ControllerGoneError(f"the controller is gone{why}"))

    def _tell(self, report: control.FromWorker) -> None:
        if not self.done.done():
            self.controller.send(Messages.encode(report))

    def _beat(self) -> None:
        if self.done.done():
            return
        runtime = self.runtime
        if runtime is not None:
            links = self.links.get(runtime.generation)
            metrics = runtime.metrics() | {
                "doors": {
                    receiving.step: {
                        "dropped": receiving.dropped,
                        **self.ingest_listeners[receiving.step].metrics(),
                    }
                    for receiving in runtime.receiving()
                },
                "unsent": links.unsent if links else 0,
                "resting": runtime.paused,
            }
            self._tell(control.Beat(runtime.generation, metrics))
        else:
            self._tell(control.Beat(-1, {}))
        moving = runtime is not None and runtime.moving
        self.loop.call_later(BEAT_S[not moving], self._beat)

    def _ordered(self, connection: Connection, data: bytes) -> None:
        with self._failing():
            for order in self.messages.feed(data):
                with self._failing():
                    # If one order fails, the following ones, perhaps Stop, are still carried out.
                    self._obey(order)

    def _obey(self, order: control.Order) -> None:
        match order:
            case control.Setup(plan, store, careful):
                if careful and self.breadcrumb is not None:
                    self.breadcrumb.be_careful(True)
                    self.loop.call_later(CAREFUL_S, self.breadcrumb.be_careful, False)
                try:
                    self.plan = _load(plan)
                    self.store = SnapshotStore(*store) if store is not None else None
                except (FlowLoadError, SnapshotError, StorageError) as error:
                    self._tell(control.Loaded(str(error)))
                else:
                    self._do(self._open_listeners(self.plan))
            case orders.Start():
                self._start(order)
            case control.Load():
                self.load = order
            case control.Look():
                self._tell(look(self.runtime, order))
            case orders.Stop(handing_over):
                if handing_over and self.runtime is not None:
                    self.runtime.saver.hand_over(self._stop)
                else:
                    self._stop()
            case _ if self.runtime is None or order.generation != self.runtime.generation:
                pass  # of an earlier generation
            case orders.Begin():
                self.runtime.begin(microseconds(), order.snapshot)
                for receiving in self.runtime.receiving():
                    self.ingest_listeners[receiving.step].attach(receiving, order.generation)
                self._pump_soon()
            case control.Granted() | control.Rejected() | control.Wanted():
                self.ingest_listeners[order.step].obey(order)
            case control.Elsewhere():
                self.ingest_listeners[order.step].elsewhere = order.address
            case orders.Tell(_, _, m.Join()):
                self.joins.append(order)
                self._try_join()
            case orders.Tell(_, stage, event):
                self.runtime.tell(stage, event)
                self._after_work()
            case orders.TakeSnapshot(_, snapshot, full):
                self.runtime.saver.take(snapshot, full)
                self._pump_soon()
            case orders.Settled():
                self.runtime.saver.settle(order)
            case orders.EndSources():
                self.runtime.end_sources()
                self._after_work()
            case orders.StopSources():
                self.runtime.stop_sources()
                self._after_work()

    async def _open_listeners(self, plan: Plan) -> None:
        """Listen for connectors, if the flow has sources for them, and report the addresses."""
        addresses = []
        share = len(plan.pushed)
        for step, source in plan.pushed.items():
            listener = self.ingest_listeners[step] = IngestListener(
                source, step, self._tell, self._pump_soon, share
            )
            try:
                addresses.append((step, await listener.open(self.host, self.spec.worker)))
            except OSError as error:
                port = (source.port or 0) + self.spec.worker
                why = f"{source} cannot listen on {self.host}:{port}: {error.strerror or error}"
                in_use = error.errno == errno.EADDRINUSE
                self._tell(control.Loaded(why, passing=in_use))
                return
        self._tell(control.Loaded(None, tuple(addresses)))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stop(self) -> None:
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            error = _close_runtime(runtime)
            if error is not None:
                # A source or sink that cannot be closed must not keep the process.
                self._tell(self._failure(runtime.generation, error))
        if not self.done.done():
            self.done.set_result(None)

    # ------------------------------------------------------------ a generation begins

    def _start(self, order: orders.Start) -> None:
        if self.runtime is not None:
            self.runtime.close()
            self.runtime = None
        for generation in [g for g in self.links if g < order.generation]:
            self.links.pop(generation).close()
        self.start = order
        self.joins = []
        self.reported_end = False
        self.under_pressure = False
        links = self._links_of(order.generation)
        for worker, address in order.dial:
            self._do(self._dial(links, worker, address))
        self._try_ready()

    def _links_of(self, generation: int) -> _Links:
        if generation not in self.links:
            self.links[generation] = _Links(self, generation)
        return self.links[generation]

    async def _dial(self, links: _Links, worker: Worker, address: orders.Address) -> None:
        who = {"worker": self.spec.worker, "generation": links.generation}

        def opened(connection: Connection) -> None:
            links.add(worker, connection)
            self._linked()

        try:
            await self.loop.create_connection(
                lambda: Connection(
                    self.spec.secret, opened, self._linked_data, self._unlinked, who
                ),
                *address,
            )
        except OSError as error:
            self._lost_link(links.generation, worker, error)

    def _accept(self) -> Connection:
        return Connection(self.spec.secret, self._called, self._linked_data, self._unlinked)

    def _called(self, connection: Connection) -> None:
        """Accept a link from another worker."""
        worker, generation = connection.who.get("worker"), connection.who.get("generation")
        if not isinstance(worker, int) or not isinstance(generation, int):
            raise HelloError("the hello of a link has no worker number and generation")
        if self.start is not None and generation < self.start.generation:
            raise HelloError(f"generation {generation} is over")
        self._links_of(generation).add(worker, connection)
        self.loop.call_soon(self._linked)  # the hello must be answered before any message is sent

    def _linked(self) -> None:
        self._try_ready()
        self._try_join()

    def _try_ready(self) -> None:
        """Make the stages when all links are open."""
        start = self.start
        if start is None or self.runtime is not None or self.plan is None or self.loading:
            return
        links = self._links_of(start.generation)
        if not set(start.members) - {self.spec.worker} <= links.open.keys():
            return
        with self._failing():
            environment = Environment(
                send=self._sender(links),
                report=self._reporter(start.generation),
                to_driver=self._carrier(start.generation),
                clock=microseconds,
                has_room=links.has_room,
                tell=self._tell,
                mark=self._marker(start.generation),
                keep=gc.freeze,
                warn=lambda text, about: self._tell(control.Warned(start.generation, text, about)),
                background=self._background(start),
            )
            runtime = Runtime(
                self.plan,
                self.spec.worker,
                start.generation,
                start.placement,
                start.members,
                start.epochs,
                environment,
                microseconds(),
                self.store,
            )
            if self.store is None or (start.snapshot is None and not start.recover):
                self._ready(runtime, links)
                return
            self.loading = True
            self._do(self._fill(runtime, start, self.load, links))

    def _ready(self, runtime: Runtime, links: _Links) -> None:
        self.runtime = runtime
        self._tell(orders.Ready(runtime.generation))
        early_data, links.early_data = links.early_data, []
        for link, data in early_data:
            self._linked_data(link, data)

    async def _fill(
        self, runtime: Runtime, start: orders.Start, load: control.Load, links: _Links
    ) -> None:
        """Load the snapshot that the generation begins with; another thread reads the files, one after the other."""
        try:
            with self._failing():
                if start.recover:
                    tokens = list(load.tokens) if start.snapshot is not None else []
                    recover = partial(runtime.saver.recover, tokens)
                    _, error = await self.loop.run_in_executor(self.threads, attempt, recover)
                    if error is not None:
                        raise error
                if start.snapshot is not None:
                    assert load.snapshot == start.snapshot
                    runtime.restore(load.frontiers)
                    await load_parts(
                        runtime,
                        SnapshotStore(*load.store),
                        load.parts,
                        start.placement,
                        self.threads,
                    )
        finally:
            self.loading = False
        if self.start is start and not self.done.done():
            if self.runtime is None and not links.closing:
                with self._failing():
                    self._ready(runtime, links)
        else:
            runtime.close()
            self._try_ready()

    def _background(self, start: orders.Start) -> Callable[[Work, Then], None]:
        """Return a function that runs work in another thread, for one generation."""

        def background(work: Work, then: Then) -> None:
            def done(future: asyncio.Future[Any]) -> None:
                if self.start is not start or future.cancelled() or self.done.done():
                    return
                with self._failing():
                    then(*future.result())

            self.loop.run_in_executor(self.threads, attempt, work).add_done_callback(done)

        return background

    def _try_join(self) -> None:
        """Add new workers to the stages when the links to them are open."""
        runtime = self.runtime
        if runtime is None or not self.joins:
            return
        links = self._links_of(runtime.generation)
        assert self.plan is not None
        if len(self.joins) < len(self.plan.stages):
            return
        if not {w for tell in self.joins for w in tell.event.workers} <= links.open.keys():  # type: ignore[union-attr]
            return
        joins, self.joins = self.joins, []
        with self._failing():
            for tell in joins:
                runtime.tell(tell.stage, tell.event)
            if self.under_pressure:  # new workers do not know it yet
                for worker in joins[0].event.workers:  # type: ignore[union-attr]
                    links.send(worker, encode(links.generation, 0, Pressure(True)))
            self._tell(orders.Joined(runtime.generation))
            self._after_work()

    # ------------------------------------------------------------ links

    def _sender(self, links: _Links) -> Callable[[Worker, int, m.Message], None]:
        generation, send_frame, moving = links.generation, links.send, links.moving

        def send(to: Worker, stage: int, message: m.Message) -> None:
            send_frame(to, encode(generation, stage, message))
            if isinstance(message, m.Acquire):
                moving[to] = moving.get(to, 0) + len(message.state)

        return send

    def _reporter(self, generation: int) -> Callable[[int, m.Command], None]:
        def report(stage: int, command: m.Command) -> None:
            assert isinstance(command, m.Started | m.Completed | m.Left)
            if isinstance(command, m.Completed) and self.runtime is not None:
                # Send the metrics of the move now: this worker may have left by the next heartbeat.
                self._tell(control.Beat(generation, self.runtime.metrics()))
            self._tell(orders.Report(generation, stage, command))

        return report

    def _carrier(self, generation: int) -> Callable[[int, str, Sequence[Any]], None]:
        def carry(stage: int, step: str, items: Sequence[Any]) -> None:
            data = encode_column(list(items))
            self._tell(control.Items(generation, stage, step, data, len(items)))

        return carry

    def _marker(self, generation: int) -> Callable[[int, str, int], None]:
        return lambda *mark: self._tell(control.Mark(generation, *mark))

    def _linked_data(self, link: Connection, data: bytes) -> None:
        links, worker = link.tag
        runtime = self.runtime
        if links.closing:
            return
        if runtime is None or runtime.generation != links.generation:
            links.early_data.append((link, data))
            return
        with self._failing():
            for frame in links.readers[link].feed(data):
                message = frame.message
                if isinstance(message, Pressure):
                    self._pressure(links, worker, message.on)
                elif isinstance(message, Taken):
                    links.moving[worker] -= message.size
                else:
                    runtime.receive(worker, frame.stage, message)
                    if isinstance(message, m.Acquire):
                        taken = Taken(len(message.state))
                        links.send(worker, encode(links.generation, 0, taken))
                if self.runtime is not runtime:
                    return
            self._flush_soon()

    def unpickling(self, stage: int) -> Unpickling:
        """Return the context in which records for a stage are unpickled."""
        assert self.plan is not None
        return Unpickling(self.plan.stages[stage].name)

    def _unlinked(self, link: Connection, error: Exception | None) -> None:
        if link.tag is None:
            if error is not None and link.who and "generation" in link.who:
                generation, worker = link.who["generation"], -1
                self._lost_link(generation, worker, error)
            return
        links, worker = link.tag
        links.open.pop(worker, None)
        links.overloaded.discard(worker)
        if not links.closing:
            self._lost_link(links.generation, worker, error)

    def _lost_link(self, generation: int, worker: Worker, error: Exception | None) -> None:
        """Report a failure if the worker at the other end is still a member."""
        if self.start is None or generation != self.start.generation or self.done.done():
            return
        runtime = self.runtime
        if runtime is not None and not any(
            worker in runner.distributor.members for runner in runtime.stages
        ):
            return
        text = f"the link to worker {worker} is lost" + (f": {error}" if error else "")
        self._tell(orders.Failed(generation, text, final=False))

    # ------------------------------------------------------------ work

    def _pump_soon(self) -> None:
        if self._pumping is not None:
            self._pumping.cancel()
        self._pumping = self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        runtime = self.runtime
        self._pumping = None
        if runtime is None:
            return
        with self._failing():
            delay = runtime.pump(microseconds())
            self._after_work()
            if delay:
                self._pumping = self.loop.call_later(delay, self._pump)
            else:
                self._pumping = self.loop.call_soon(self._pump)

    def _flush_soon(self) -> None:
        """Send what stages have put aside once all links with data have been read."""
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self.runtime is not None:
            with self._failing():
                self.runtime.flush_outlets()
                self._after_work()

    def _after_work(self) -> None:
        """Pause sources or let them go on, and notice the end of the stages."""
        runtime = self.runtime
        if runtime is None:
            return
        links = self.links[runtime.generation]
        unsent = links.unsent
        high, low = (
            (HIGH_MOVING_BYTES, MAX_MOVING_BYTES)
            if runtime.moving_lately
            else (HIGH_BYTES, LOW_BYTES)
        )
        if unsent > high and not self.under_pressure:
            self._set_pressure(links, True)
        elif self.under_pressure and unsent <= low:
            self._set_pressure(links, False)
        runtime.paused = self.under_pressure or bool(links.overloaded)
        if runtime.ended and not self.reported_end:
            self.reported_end = True
            runtime.flush()
            self._tell(orders.Ended(runtime.generation))
        elif self.reported_end and not runtime.ended:
            self.reported_end = False

    def _set_pressure(self, links: _Links, on: bool) -> None:
        self.under_pressure = on
        for worker in links.open:
            links.send(worker, encode(links.generation, 0, Pressure(on)))

    def _pressure(self, links: _Links, worker: Worker, on: bool) -> None:
        if on:
            links.overloaded.add(worker)
        else:
            links.overloaded.discard(worker)

    # ------------------------------------------------------------ failure

    def _failing(self) -> contextlib.AbstractContextManager[None]:
        return _Failing(self)

    def fail(self, error: BaseException) -> None:
        """Report a failure to the controller, and wait for its orders."""
        generation = self.start.generation if self.start is not None else 0
        if self.runtime is not None:
            runtime, self.runtime = self.runtime, None
            _close_runtime(runtime)  # its errors are consequences of the reported one
        links = self.links.get(generation)
        if links is not None:
            links.closing = True
        self._tell(self._failure(generation, error))

    def _failure(self, generation: int, error: BaseException) -> orders.Failed:
        """Return the report that `error` ended this worker's part in a generation."""
        final = is_permanent(error, self.store is not None)
        step = error.step if isinstance(error, StepError | InterruptedCallError) else ""
        text = (
            str(error)
            if isinstance(error, RailgunError | InterruptedCallError)
            else "".join(traceback.format_exception(error))
        )
        return orders.Failed(generation, text, final, step)


class _Failing(contextlib.AbstractContextManager[None]):
    """Reports errors in its block to the controller."""

    def __init__(self, process: _Process) -> None:
        self.process = process

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or _ends_process(error):
            return False
        # An event loop would swallow a `CancelledError` of user code, and its records would be lost silently.
        self.process.fail(error)
        return True


def _ends_process(error: BaseException) -> bool:
    """Return whether an exception is to end this process; one raised by user code is not."""
    ends = isinstance(error, SystemExit | KeyboardInterrupt)
    return ends and not isinstance(error, InterruptedCallError)


def _close_runtime(runtime: Runtime) -> BaseException | None:
    """Close a runtime. Return what its sources or sinks raised, or None."""
    try:
        runtime.close()
    except BaseException as error:
        if _ends_process(error):
            raise
        return error
    return None


class FlowLoadError(RailgunError):
    """The flow cannot be unpickled on this worker."""


def _load(plan: bytes) -> Plan:
    try:
        with Call("", UNPICKLE_FLOW):  # imports modules of users
            loaded = pickle.loads(plan)
        adopt_classes()
    except ModuleNotFoundError as error:
        raise FlowLoadError(
            f"the flow needs the module {error.name!r}, which this worker cannot import. "
            "Install it where the workers run, or send it along: run(flow, by_value=[module])"
        ) from error
    except BaseException as error:
        pass_interrupt(error)
        raise FlowLoadError(f"the flow cannot be loaded on this worker: {error!r}") from error
    assert isinstance(loaded, Plan)
    return loaded


def _own_address(controller: str) -> str:
    """Return the address of this machine in the controller's network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((controller, 9))
        address: str = probe.getsockname()[0]
        return address


def keep_memory() -> None:
    """Configure the allocator and the garbage collector for a process that keeps much state and must not pause.

    Freeing one large block makes glibc keep freed memory (its thresholds follow the largest block freed). A full
    collection scans all state, so it is disabled: only recently made objects are scanned.
    """
    bytes(24 << 20)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 1 << 30, 1 << 30)
