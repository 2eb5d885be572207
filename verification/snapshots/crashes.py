"""Simulate a flow that is saved and restarted, on workers and a disk to which chance does everything that can happen.

One simulated job is a chain of runs on one disk. A run is a `World`: the production machine, storekeeper, runtimes,
savers and loading. The seed decides what happens at every step: messages, work, threads, writes of the store; rescales,
snapshots, the loss of a worker, the loss of the driver between any two steps of any write, with or without the power;
threads of lost workers that go on for a while; a disk that is full or cannot be read for a while; a stop, a new run on
another number of workers. After enough of that, the flow must come to its end by itself.

What must hold:

a. **State.** The content of a committed snapshot, and the state with which a generation begins, is the fold of exactly
   what was read of every part up to the position saved with it.
b. **Output.** The two-phase sink shows at every moment the output of a committed snapshot, as far as it has been
   published: nothing else, nothing twice, and nothing ever disappears. When a generation begins, and at the end, it
   shows all of it.
c. **Collect** has, when a generation begins and at the end, the same, except for the output of earlier runs.
d. **Numbers** of generations and snapshots are never used twice, over all runs; nor is a file written twice.
e. **The end** comes, with all parts read, all timers fired and all keys ended once.
f. **Retention.** Only retention removes a committed snapshot, and no manifest names a part that is gone.
g. **Time** does not go back for any key, wherever the key goes and whatever is loaded.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, NoReturn

from railgun.engine.controller import storekeeper
from railgun.engine.controller.storekeeper import FinishedError, Snapshots, Storekeeper
from railgun.engine.operators import changes, keyed, stateless
from railgun.engine.operators.stateful import StatefulSteps
from railgun.engine.protocol.frontier import MIN
from railgun.engine.protocol.lifecycle.machine import Lifecycle, LifecycleError
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.snapshots import store, table
from railgun.engine.snapshots.errors import SnapshotError
from railgun.engine.snapshots.manifest import Manifest, checksum
from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.snapshots.table import read_rows
from railgun.engine.worker import loading, stage
from railgun.engine.worker.runtime import Environment, Runtime
from railgun.errors import RailgunError
from railgun.flows.plan import Plan
from railgun.hashing import key_hash
from railgun.storage.errors import StorageError
from railgun.storage.object_store import disk_error
from railgun.testing.disks import Crash, Step
from railgun.testing.world import TICK_US, Process, World
from verification.rescale.model import Violation
from verification.snapshots import flow as sf
from verification.snapshots.external_systems import (
    Disk,
    Drawer,
    PlainTable,
    SharedDrawer,
    read_plain,
)

NEVER: Final = 1e9  # seconds
MAX_STEPS: Final = 12_000  # an undisturbed flow ends long before
RUNS: Final = 200
FOCUSED: Final = 1 / 3  # of all jobs
NAMED: Final = (
    1_000_000  # a bomb that goes off when a manifest has its name, which is not synced yet
)
SLOW: Final = (0, 0, 0, 0, 0, 1)  # items that a part brings at once
QUICK: Final = (0, 1, 2, 5)
SAVED: Final = ("source", "first", "second", "sums")

Change = tuple[Any, str, Any]
"""An attribute of a module or class, and its temporary replacement."""


@contextmanager
def patched(changes: Sequence[Change]) -> Iterator[None]:
    """Replace attributes within the block."""
    with ExitStack() as stack:
        for where, name, other in changes:
            stack.callback(setattr, where, name, where.__dict__[name])
            setattr(where, name, other)
        yield


# ---------------------------------------------------------------- the simulation


class SlowWorld(World):
    """A world in which links and disks may be slow, until it is left in peace."""

    job: Job

    def happen(self) -> bool:
        """Let one thing happen; workers work also while messages are under way."""
        if not self._worker_queue and self.processes and self.chance.random() < self.job.eager:
            workers = sorted(self.processes)
            self._worker_queue = deque(self.chance.sample(workers, len(workers)))
            self.wake()
        return super().happen()

    def _work(self, worker: Worker) -> bool:
        job = self.job
        slow = job.slow_worker == worker and job.steps < job.trouble
        if slow and job.slow_chance.random() < job.slowness:
            return True  # the worker gets no processor this time
        return super()._work(worker)

    def _possible_events(self) -> list[Callable[[], None]]:
        things = super()._possible_events()
        job = self.job
        if job.steps >= job.trouble:
            return things
        random = self.chance.random
        return [
            thing
            for thing in things
            if random() < job.speed.get(getattr(thing, "__func__", None), 1.0)
        ]


@dataclass(slots=True)
class Outcome:
    """The result of a seed."""

    seed: int
    violation: Violation | None
    counts: Counter[str]
    trace: list[str] = field(repr=False)

    def story(self, lines: int = 40) -> str:
        """Return the last `lines` of the trace, for people."""
        text_lines = [f"seed {self.seed}: {self.violation or 'all is well'}"]
        if len(self.trace) > lines:
            text_lines.append(f"  … {len(self.trace) - lines} lines before")
        return "\n".join(text_lines + [f"  {line}" for line in self.trace[-lines:]])

    def tally(self) -> Counter[str]:
        """Return counts that can be added up."""
        return self.counts + Counter(jobs=1, violations=self.violation is not None)


class Job:
    """One job: its items, its disks, its runs."""

    def __init__(self, seed: int, without: Sequence[Step] = ()) -> None:
        self.seed = seed
        self.chance = chance = random.Random(seed)
        self.items = sf.make_items(chance)
        self.united, self.summed = chance.random() < 0.4, chance.random() < 0.3
        self.parquet = chance.random() < 0.06
        self.disk = Disk(seed, without)
        drawer = SharedDrawer if seed % 5 == 2 else Drawer
        self.drawer = drawer(Disk(seed + 1, without))
        self.disks = self.disk, self.drawer.disk
        self.parts = sf.Parts(self.items, chance, chance.choice((SLOW, SLOW, (0, 1, 2), QUICK)))
        flow = sf.make_flow(self.parts, self.drawer, united=self.united, summed=self.summed)
        self.plan: Plan = flow.plan()
        self.keep = chance.choice((1, 1, 2, 3))
        self.trouble = chance.choice((60, 200, 400, 600))  # steps until the job is left in peace
        self.often = chance.choice((0.03, 0.06, 0.1, 0.15))
        self.deeds = self._deeds()
        # To have keys saved while they move, of each stage.
        self.keen = chance.choice(((0.0, 0.0, 0.0), (0.1, 0.1, 0.1), (0.0, 0.0, 0.2)))
        self.spite = chance.choice((0.0, 0.0, 0.05))  # to have workers lost at the wrong moment
        self.eager = chance.choice((0.02, 0.1, 0.3))
        # A worker that gets the processor less often than the others, and is still saving when they are done.
        self.slow_worker: int | None = None
        self.slowness = 0.0
        self.slow_chance = random.Random(f"slow {seed}")
        self.spoils = 0.0  # to have a write of the snapshot under way fail
        self._spoiled: tuple[str, Step] | None = (
            None  # which write is to fail next, and at which step
        )
        speeds = 0.05, 0.3, 1.0
        self.speed: dict[Any, float] = {
            Process.run_thread: chance.choice(speeds),
            World._run_store: chance.choice(speeds),
            Process.obey: chance.choice((0.3, 1.0, 1.0)),
        }
        self._perhaps_focus(random.Random(f"focus {seed}"))
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.steps = 0
        self.now = sf.BEGIN
        self.reader = SnapshotStore(self.disk, self.plan.flow)
        self.read = read_rows if self.parquet else read_plain
        self.world: World | None = None
        self._bomb: int | None = None  # steps of writes until it goes off
        self._bomb_kind = ""
        self._failing = False  # whether the disk refused a call since a run began
        self._strays: list[Callable[[], Any]] = []  # threads of workers that were given up for dead
        self._generation = 0  # the highest that any run has announced
        self._of_earlier_runs = 0
        self._snapshot = (0, 0)  # the last snapshot that began: the run, and its number
        self._began: tuple[int, int] | None = None  # the generation that was last checked
        self._run = 0
        self._looked = (-1, -1)
        self._meaning: dict[int, tuple[sf.Content, Counter[tuple[int, ...]]]] = {}
        self._manifests: dict[int, Manifest] = {}  # on the disk
        self._committed: set[int] = set()
        self._base: Counter[tuple[int, ...]] = Counter()  # output of earlier runs
        self._shown: Counter[tuple[int, ...]] = Counter()
        self._ending = ""  # how the run is to end, if it was told to
        self._over = False

    def _deeds(self) -> tuple[list[Callable[[World], None]], list[float]]:
        """Return the actions of chance and their weights; some jobs have more of one action."""
        chance = self.chance
        rough = chance.choice((0.1, 0.5, 1.2))
        weights: dict[Callable[[World], None], float] = {
            self._rescale: 4,
            self._save: 9,
            self._lose_worker: 1.5 * rough,
            self._lose_driver: 0.6 * rough,
            self._plant_bomb: 3 * rough,
            self._fill_up: 0.6 * rough,
            self._fail_reads: 0.4 * rough,
            self._mend: 2,
            self._stop: 0.4,
        }
        spread = [weight * chance.choice((0.2, 1, 1, 3)) for weight in weights.values()]
        return list(weights), spread

    def _perhaps_focus(self, chance: random.Random) -> None:
        """Make every third job one of moving keys and failing snapshots, with few crashes in between.

        Such a job shows faults that take many events in a row: a key moves between cut and commit, the snapshot fails,
        an increment follows, and then something is lost.
        """
        if chance.random() >= FOCUSED:
            return
        weights: dict[Callable[[World], None], float] = {
            self._rescale: 5,
            self._save: 9,
            self._lose_worker: chance.choice((0.1, 0.5)),
            self._lose_driver: chance.choice((0.1, 0.3)),
            self._plant_bomb: chance.choice((0.1, 0.5)),
            self._fill_up: chance.choice((0.1, 0.5)),
            self._mend: 2,
            self._stop: 0.1,
        }
        self.deeds = list(weights), list(weights.values())
        self.trouble = chance.choice((400, 800, 1200))
        self.often = chance.choice((0.06, 0.1))
        self.keen = chance.choice(((0.1, 0.1, 0.1), (0.3, 0.3, 0.3), (0.0, 0.0, 0.3)))
        self.spite = chance.choice((0.0, 0.0, 0.02))
        self.spoils = chance.choice((0.03, 0.1, 0.3))
        self.parts.pace = chance.choice((SLOW, (0,) * 20 + (1, 2)))
        self.slowness = self.slow_chance.choice((0.8, 0.95))
        slow_worker = self.slow_chance.choice((None, None, None, 0, 1))
        if random.Random(f"slow workers {self.seed}").random() < 0.5:
            self.slow_worker = slow_worker

    def settings(self) -> list[Change]:
        """Return small limits, so that little data reaches them, and a clock that shows the same to every run."""
        chance, shared = self.chance, random.Random(f"changes {self.seed}")
        clock = SimpleNamespace(
            time=itertools.count(1_700_000_000).__next__, sleep=lambda seconds: None
        )
        changed: list[Change] = [
            (stage, "CHUNK_KEYS", chance.choice((10, 20))),
            (stage, "MIN_CHUNK_KEYS", 1),
            (keyed, "BLOCK_KEYS", chance.choice((1, 3))),
            (stateless, "KEYED_BATCH_ROWS", chance.choice((1, 20))),
            (changes, "BLOCK_KEYS", chance.choice((1, 2, 5))),
            (changes, "LOOK_INTERVAL_PER_KEY", shared.choice((0, 1, 4, 1000))),
            (changes, "MAX_UNCHANGED_SHARE", shared.choice((1 / 32, 0.5, 1.0))),
            (changes, "MAX_ALL_CHANGED_KEYS", shared.choice((3, 1 << 16))),
            (storekeeper, "RESERVED_GENERATIONS", chance.choice((4, 6, 100))),
            (storekeeper, "time", clock),
            (store, "time", clock),
        ]
        if not self.parquet:
            changed += [(table, "TableWriter", PlainTable), (table, "read_rows", read_plain)]
        return changed

    def run(self) -> Outcome:
        """Run to the end, or to the first violation."""
        violation = None
        try:
            with patched(self.settings()):
                for self._run in range(RUNS):
                    if self._over:
                        break
                    self._one_run()
                if not self._over:
                    raise Violation("end", f"the flow has not ended after {RUNS} runs")
        except Violation as error:
            violation = error
        except Exception as error:
            violation = Violation(type(error).__name__, str(error))
            violation.__cause__ = error
        self.counts["steps"] = self.steps
        return Outcome(self.seed, violation, self.counts, self.trace)

    def tell(self, what: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.steps}: {what}")

    # ------------------------------------------------------------ a run

    def _one_run(self) -> None:
        self._of_earlier_runs = self._generation
        self._failing = False
        for disk in self.disks:
            disk.hook = self._hook
        try:
            self._open()
            if self.world is not None:
                self._drive(self.world)
        except Crash as crash:
            self._crashed(str(crash))
        except (SnapshotError, StorageError) as error:  # the driver cannot go on
            if self.world is None or not self._troubled():
                raise
            self._crashed(str(error))
        self.world = None

    def _troubled(self) -> bool:
        return any(disk.full or disk.unreadable for disk in self.disks) or self._failing

    def _open(self) -> None:
        workers = self.chance.choice((1, 2, 2, 3, 4))
        chosen = Snapshots("", every=self.chance.choice((NEVER, 3.0)), keep=self.keep)
        self.steps += 1
        self._meet_end_of_trouble()
        try:
            keeper = Storekeeper(self.plan, chosen, self.plan.flow, disk=self.disk)
        except FinishedError as error:
            if "visible" not in str(error) or not self._troubled():
                self._finished()
            self._perhaps_mend()
            return
        except (SnapshotError, StorageError) as error:
            if not self._troubled():
                raise
            self.tell(f"run {self._run} cannot begin: {error}")
            self._perhaps_mend()
            return
        self.counts["runs"] += 1
        loaded = keeper.manifest
        at = "nothing" if loaded is None else f"snapshot {loaded.snapshot}"
        self.tell(f"run {self._run} on {workers} workers, from {at}")
        self._look_at_disk()
        newest = max(self._committed, default=None)
        if (None if loaded is None else loaded.snapshot) != newest:
            raise Violation("retention", f"the run begins with {at}, and {newest} was committed")
        self._base = Counter() if loaded is None else self._meaning[loaded.snapshot][1]
        self._ending = ""
        self.world = SlowWorld(
            self.plan, workers, self.chance, self.now, keeper, report_errors=True
        )
        self.world.job = self

    def _perhaps_mend(self) -> None:
        if self.chance.random() < 0.5:
            self._mend(None)

    def _drive(self, world: World) -> None:
        told_events = 0
        while not world.life.gone:
            self._step(world)
            for happened in world.happened[told_events:]:
                self.tell(happened.text)
            told_events = len(world.happened)
            self._look(world)
        self._ended(world)

    def _step(self, world: World) -> None:
        self.steps += 1
        if self.steps > self.trouble + MAX_STEPS:
            raise Violation("end", f"the flow does not end: {world.life.state}")
        try:
            if self.steps >= self.trouble:
                self._meet_end_of_trouble()
            else:
                self._make_trouble(world)
            self._strays += world.stray_work
            world.stray_work.clear()
            if self._strays and self.chance.random() < 0.1:
                self._let_stray()
            if not world.happen() and not world.life.gone:
                world.life_now += TICK_US
                world.do(world.life.tick(world.life_now))
        except Crash as crash:
            process = world.acting
            if process is None or self._bomb_kind != "worker":
                raise
            self.tell(f"worker {process.worker} is lost, {crash}")
            for disk in self.disks:
                disk.dead = False
            world.acting = None
            self._lost(world, process)

    def _make_trouble(self, world: World) -> None:
        life, draw = world.life, self.chance.random
        if draw() < self.often:
            deeds, weights = self.deeds
            self.chance.choices(deeds, weights)[0](world)
        elif self._one_is_still_saving(world) and draw() < 0.2:
            self._rescale(world)
        elif self.spoils and life.saving.phase in ("saving", "whole", "writing"):
            moving = life.coordinator is not None and life.coordinator.phase == "moving"
            if draw() < (self.spoils if moving else self.spoils / 10):
                self._spoil(world)
        elif life.coordinator is not None and life.coordinator.phase in ("starting", "moving"):
            if draw() < self.keen[life.coordinator.moving]:
                self._save(world)
        elif life.saving.phase in ("whole", "writing", "publishing") and draw() < self.spite:
            deed = self.chance.choice((self._lose_worker, self._lose_worker, self._lose_driver))
            deed(world)

    def _one_is_still_saving(self, world: World) -> bool:
        """Return whether the slow worker has keys left to save, and another has saved all of its keys."""
        if self.slow_worker is None or world.life.saving.phase != "saving":
            return False
        saving = {
            worker: any(o.changes is not None and o.changes.saving for o in runtime.keyed())
            for worker, runtime in world.runtimes.items()
        }
        return saving.get(self.slow_worker, False) and not all(saving.values())

    def _meet_end_of_trouble(self) -> None:
        if self.steps >= self.trouble:
            self.parts.pace = QUICK
            self._bomb = self._spoiled = None
            for disk in self.disks:
                disk.full = disk.unreadable = False

    def _ended(self, world: World) -> None:
        """Handle the end of a run: its processes are gone."""
        life = world.life
        assert world.keeper is not None
        self.counts[life.state] += 1
        if life.state == "failed":
            self._check_cause(life)
        self._look_at_disk()
        if self._bomb is not None and self._bomb_kind != "worker":
            self._bomb = None
        world.keeper.close()
        saving = life.saving
        done = saving.last and saving.committed == saving.number and saving.phase == "none"
        if life.state == "finished" and done and self._ending != "stop":
            assert saving.committed is not None
            wanted, out = self._meaning[saving.committed]
            self._compare("at the end", self._state_of(world.left.values()), wanted)
            self._compare_shown("at the end", out)
            self._compare_collected("at the end", world, out)
        elif life.state == "finished" and done:
            assert saving.committed is not None
            self._compare_shown("stopped", self._meaning[saving.committed][1])

    def _check_cause(self, life: Lifecycle) -> None:
        expected_causes = (
            "is lost",
            "within",
            "cannot be saved",
            "there is no room",
            "Input/output error",
        )
        if not any(part in life.cause for part in expected_causes):
            raise Violation("failure", life.cause)

    def _finished(self) -> None:
        """Check the end that the flow reports."""
        self._over = True
        self._look_at_disk()
        newest = max(self._committed)
        content, out = self._meaning[newest]
        self.tell(f"all is over, in snapshot {newest}")
        self._compare_shown("when all is over", out)
        late = [key for key, state in content.first.items() if not state["ended"]]
        if content.timers or late:
            raise Violation("end", f"timers {content.timers} are left, keys {late} have not ended")
        if self._ending != "drain":
            read = {part: len(items) for part, items in enumerate(self.items)}
            there = {part: position for part, (position, _) in content.source.items()}
            if read != there:
                raise Violation("end", f"read is {there} of {read}")

    # ------------------------------------------------------------ events of chance

    def _rescale(self, world: World) -> None:
        life = world.life
        workers = range(self.chance.choice((1, 2, 3, 4)))
        pins = {}
        if self.chance.random() < 0.3:
            keys = [item.key for items in self.items for item in items]
            pinned = self.chance.sample(keys, min(4, len(keys)))
            pins = {key_hash(key): self.chance.choice(workers) for key in pinned}
        with suppress(LifecycleError):  # the flow has ended, or is about to
            orders = life.scale(Placement.of(workers, keys=pins), world.life_now)
            self.tell(f"rescale to {len(workers)}")
            self.counts["rescales"] += 1
            world.do(orders)

    def _save(self, world: World) -> None:
        if not world.life.over:
            world.do(world.life.snapshot(world.life_now))

    def _lose_worker(self, world: World) -> None:
        if world.processes:
            process = self.chance.choice(list(world.processes.values()))
            self.tell(f"worker {process.worker} is lost")
            self._lost(world, process)

    def _lost(self, world: World, process: Process) -> None:
        self.counts["workers lost"] += 1
        if self.chance.random() < 0.5:
            self._strays += [work for _, work, _ in process.threads]
        if self.chance.random() < 0.5:  # its earlier messages arrive first
            while process.reports:
                world.hear(process)
        world.gone(process, "it crashed")

    def _lose_driver(self, world: World) -> None:
        raise Crash("just so")

    def _plant_bomb(self, world: World) -> None:
        if self._bomb is None:
            self._bomb = self.chance.randrange(self.chance.choice((6, 30)))
            kinds = "worker", "driver", "power", "power", "error"
            self._bomb_kind = self.chance.choice(kinds)

    def _spoil(self, world: World) -> None:
        """Make the next write of a file of state, or of the manifest, fail: before the write, or after it has landed.

        Or make a manifest impossible to delete, or lose the driver before the name of a manifest is synced.
        """
        if self._spoiled is not None:
            return
        kind = self.chance.choice(("/data/", "/manifests/", "/manifests/"))
        steps: tuple[Step, ...] = ("write", "rename", "sync directory", "done")
        if kind == "/manifests/":
            steps += ("delete",)
        self._spoiled = kind, self.chance.choice(steps)
        if self._spoiled == ("/manifests/", "sync directory") and self.chance.random() < 0.3:
            self._spoiled = None
            if self._bomb is None:
                self._bomb, self._bomb_kind = NAMED, "driver"

    def _hook(self, step: Step, path: str) -> None:
        if self._spoiled is not None and self._spoiled[0] in path and self._spoiled[1] == step:
            landed = step in ("sync directory", "done") and "/manifests/" in path
            stays = landed and self.chance.random() < 0.5  # the file cannot be deleted, either
            self._spoiled = ("/manifests/", "delete") if stays else None
            self._fail_write(step, path)
        if self._bomb is None:
            return
        if self._bomb == NAMED:
            self._bomb = 0 if "/manifests/" in path and step == "sync directory" else NAMED
            if self._bomb == NAMED:
                return
        self._bomb -= 1
        if self._bomb < 0:
            self._bomb = None
            if self._bomb_kind == "error":
                self._fail_write(step, path)
            for disk in self.disks:
                disk.dead = True
            raise Crash(f"before {step!r} of {path}")

    def _fail_write(self, step: Step, path: str) -> NoReturn:
        self._failing = True
        self.counts["writes failed"] += 1
        self.tell(f"an error at {step!r} of {path}")
        raise disk_error("write", path, OSError(errno.EIO, os.strerror(errno.EIO)))

    def _fill_up(self, world: World) -> None:
        disk = self.chance.choice((*self.disks, self.disk, self.disk))
        disk.full = True
        self.tell(f"no room for {'snapshots' if disk is self.disk else 'output'}")

    def _fail_reads(self, world: World) -> None:
        self.chance.choice(self.disks).unreadable = True
        self.tell("a disk cannot be read")

    def _mend(self, world: World | None) -> None:
        for disk in self.disks:
            disk.full = disk.unreadable = False

    def _stop(self, world: World) -> None:
        drain = self.chance.random() < 0.2
        if not world.life.over and not self._ending:
            self._ending = "drain" if drain else "stop"
            self.tell(self._ending)
            world.do(world.life.stop(world.life_now, drain=drain))

    def _let_stray(self) -> None:
        """Let a thread of a worker that was given up for dead come to its end."""
        work = self._strays.pop(self.chance.randrange(len(self._strays)))
        self.counts["strays"] += 1
        bomb, self._bomb = self._bomb, None
        with suppress(RailgunError):
            work()
        self._bomb = bomb

    def _crashed(self, where: str) -> None:
        """Handle the loss of the driver, and all its workers with it."""
        power = self._bomb_kind == "power" or (where == "just so" and self.chance.random() < 0.5)
        self.tell(f"the driver is lost, {where}" + (", and the power" if power else ""))
        self.counts["power lost" if power else "drivers lost"] += 1
        self._bomb = None
        if power:
            self._strays = []
        elif self.world is not None and self.chance.random() < 0.5:
            for process in self.world.processes.values():
                self._strays += [work for _, work, _ in process.threads]
        for disk in self.disks:
            disk.dead = False
            disk.hook = None
            if power:
                disk.lose_power()
            else:
                disk.crash()
            disk.changes += 1
        self._look_at_disk(committed=False)

    # ------------------------------------------------------------ checks

    def _look(self, world: World) -> None:
        """Check the world after each step."""
        life = world.life
        for process in world.processes.values():
            if process.generation > self._generation:
                self._generation = process.generation
            elif 0 < process.generation <= self._of_earlier_runs:
                text = f"generation {process.generation} of an earlier run begins again"
                raise Violation("numbers", text)
        saving = life.saving
        if saving.phase == "saving" and (self._run, saving.number) != self._snapshot:
            if saving.number <= self._snapshot[1]:
                text = f"snapshot {saving.number} comes after {self._snapshot[1]}"
                raise Violation("numbers", text)
            self._snapshot = self._run, saving.number
            self.counts["snapshots begun"] += 1
        if (self.disk.changes, self.drawer.disk.changes) != self._looked:
            self._look_at_disk()
        if life.coordinator is not None and self._began != (self._run, life.generation):
            self._began = self._run, life.generation
            self._generation_began(world)
        if life.coordinator is not None:
            self._look_at_time(world)

    def _look_at_time(self, world: World) -> None:
        """Record in each key's state the frontier of the key, which must not be less than before.

        The record travels and is saved with the state. So it is not changed between a cut and the end of saving.
        """
        for worker, runtime in world.runtimes.items():
            for operator in runtime.keyed():
                if not isinstance(operator, StatefulSteps):
                    continue
                saving = operator.changes is not None and operator.changes.saving
                for key, state in operator.states.items():
                    frontier = max(operator.reached(), operator.floors.get(key, MIN))
                    seen = state["seen"]
                    if frontier < seen.frontier:
                        text = f"for key {key} on worker {worker} time goes back"
                        raise Violation("time", f"{text} from {seen.frontier} to {frontier}")
                    if not saving:
                        seen.frontier = frontier

    def _generation_began(self, world: World) -> None:
        """Check a new generation: all workers are ready, none has begun."""
        self.counts["generations"] += 1
        at = world.life.saving.committed
        content, out = (_NOTHING, Counter[tuple[int, ...]]()) if at is None else self._meaning[at]
        where = f"generation {world.life.generation}, which begins with {at or 'nothing'}"
        runtimes = [world.processes[w].runtime for w in world.life.placement.workers]
        self._compare(where, self._state_of([r for r in runtimes if r is not None]), content)
        self._compare_shown(where, out)
        self._compare_collected(where, world, out)

    def _state_of(self, runtimes: Iterable[Runtime]) -> sf.Content:
        states: dict[str, dict[int, Any]] = {step: {} for step in SAVED}
        timers: dict[int, list[int]] = {}
        ended: set[int] = set()
        for runtime in runtimes:
            for runner in runtime.stages:
                for operator in runner.operators.keyed:
                    twice = states[operator.step].keys() & operator.states.keys()
                    if twice:
                        raise Violation("state", f"{operator.step}: two workers have {twice}")
                    states[operator.step].update(operator.states)
                    keys = list(operator.states)
                    times = zip(keys, operator.timers.of(keys), strict=True)
                    timers.update({key: at for key, at in times if at})
                    ended |= operator.ended
        positions = {part: (p.position or 0, p.finished) for part, p in states["source"].items()}
        return sf.Content(
            positions, states["first"], timers, ended, states["second"], states["sums"]
        )

    def _compare(self, where: str, content: sf.Content, wanted: sf.Content) -> None:
        if content.source != wanted.source:
            text = f"positions {content.source}, and must be {wanted.source}"
            raise Violation("state", f"{where}: {text}")
        wrong = sf.different(content, wanted)
        if wrong:
            raise Violation("state", f"{where}: {wrong}")

    def _compare_shown(self, where: str, out: Counter[tuple[int, ...]]) -> None:
        _same("output", f"{where}: shown", self._shown, out)

    def _compare_collected(self, where: str, world: World, out: Counter[tuple[int, ...]]) -> None:
        there = Counter(world.ledger.collected.items("shown"))
        _same("Collect", f"{where}: collected", there, out - self._base)

    def _look_at_disk(self, committed: bool = True) -> None:
        """Check the content of the disks; `committed`: whether finished writes have been reported as finished."""
        self._looked = self.disk.changes, self.drawer.disk.changes
        start = f"{self.plan.flow}/manifests/"
        there = {int(n[:-5]): f"{start}{n}" for n in self.disk.list(start[:-1])}
        parts = {f"data/{name}" for name in self.disk.list(f"{self.plan.flow}/data")}
        self._manifests = {n: m for n, m in self._manifests.items() if n in there}
        for number, path in sorted(there.items()):
            fresh = number not in self._manifests
            if fresh:
                self._manifests[number] = Manifest.from_json(self.disk.look(path), path)
            manifest = self._manifests[number]
            gone = [part.path for part in manifest.parts if part.path not in parts]
            if gone:
                raise Violation("retention", f"snapshot {number} names {gone[0]}, which is gone")
            if fresh:
                self._check_parts(manifest)
                if number not in self._meaning:
                    self._meaning[number] = self._judge(manifest)
                    self._try_to_load(manifest)
        if committed:
            settled = there.keys() - self._undecided()
            self.counts["snapshots"] += len(settled - self._committed)
            self._committed |= settled
        kept = sorted(self._committed | there.keys())[-self.keep :]
        if not there.keys() >= set(kept):
            raise Violation("retention", f"of {kept}, which are to be kept, {sorted(there)} exist")
        self._look_at_shown()

    def _undecided(self) -> set[int]:
        """Return the snapshot whose manifest is being written, or taken back, if there is one."""
        saving = None if self.world is None else self.world.life.saving
        return set() if saving is None or saving.phase != "writing" else {saving.number}

    def _check_parts(self, manifest: Manifest) -> None:
        for part in manifest.parts:
            if checksum(self.disk.look(f"{self.plan.flow}/{part.path}")) != part.checksum:
                text = f"snapshot {manifest.snapshot} names {part.path}, which is not whole"
                raise Violation("retention", text)

    def _look_at_shown(self) -> None:
        shown = self.drawer.shown()
        if shown != self._shown:
            lost = self._shown - shown
            if lost:
                raise Violation("output", f"{_some(lost)} was shown, and is not any more")
            self._shown = shown
        newest = max(self._manifests, default=None)
        right = Counter[tuple[int, ...]]() if newest is None else self._meaning[newest][1]
        extra = shown - right
        if extra:
            twice = {item for item, count in extra.items() if count < shown[item]}
            what = "more than once" if twice else f"but snapshot {newest} does not hold it"
            raise Violation("output", f"{_some(extra)} is shown, {what}")

    def _judge(self, manifest: Manifest) -> tuple[sf.Content, Counter[tuple[int, ...]]]:
        """Read the content of a snapshot naively, and check that it follows from its positions."""
        states: dict[str, dict[int, Any]] = {step: {} for step in SAVED}
        timers: dict[int, list[int]] = {}
        ended: set[int] = set()
        at = f"snapshot {manifest.snapshot}"
        for number in sorted({part.snapshot for part in manifest.parts}):
            lives: set[tuple[str, int]] = set()
            for step, key, state, times, over, gone in self._rows(manifest, number):
                if gone:
                    if (step, key) not in lives:
                        states[step].pop(key, None)
                        if step == "first":  # other steps may have keys with the same numbers
                            timers.pop(key, None)
                    continue
                if (step, key) in lives:
                    raise Violation("state", f"{at}: two rows of key {key} of {step!r}: {state}")
                lives.add((step, key))
                states[step][key] = state
                if step == "first":
                    timers.pop(key, None)
                    timers.update({key: times} if times else {})
                    ended -= {key}
                    ended |= {key} if over else set()
        ended &= states["first"].keys()
        positions = {part: (p or 0, over) for part, (p, over, _) in states["source"].items()}
        content = sf.Content(
            positions, states["first"], timers, ended, states["second"], states["sums"]
        )
        wanted, out = sf.expected(self.items, content, united=self.united, summed=self.summed)
        self._compare(at, content, wanted)
        self.counts["full" if manifest.full else "increments"] += 1
        return content, out

    def _try_to_load(self, manifest: Manifest) -> None:
        """Check the state with which workers would begin if they loaded this snapshot now."""
        chance = random.Random(manifest.snapshot)
        workers = chance.randint(1, 3)
        placement = Placement.of(range(workers))
        epochs = [0] * len(self.plan.stages)
        environment = Environment(
            *(lambda *_: None, lambda *_: None, lambda *_: None),
            clock=lambda: self.now,
        )
        unreadable, self.disk.unreadable = self.disk.unreadable, False
        runtimes = []
        for worker in range(workers):
            runtime = Runtime(
                *(self.plan, worker, 0, placement, range(workers), epochs, environment, self.now),
                self.reader,
            )
            loading.load_at_once(runtime, self.reader, manifest.parts, placement)
            runtimes.append(runtime)
        self.disk.unreadable = unreadable
        where = f"snapshot {manifest.snapshot}, loaded by {workers} workers"
        self._compare(where, self._state_of(runtimes), self._meaning[manifest.snapshot][0])

    def _rows(self, manifest: Manifest, number: int) -> Iterator[tuple[Any, ...]]:
        for part in manifest.parts:
            if part.snapshot == number:
                rows = self.read(self.disk.look(f"{self.plan.flow}/{part.path}"))
                yield from zip(
                    *([part.step] * len(rows.keys), rows.keys, rows.states),
                    *(rows.timers, rows.ended, rows.deleted),
                    strict=True,
                )


_NOTHING: Final = sf.Content({}, {}, {}, set(), {}, {})


def _some(items: Mapping[Any, int]) -> str:
    return ", ".join(map(str, sorted(items)[:3])) + (" …" if len(items) > 3 else "")


def _same(kind: str, where: str, actual: Counter[Any], wanted: Counter[Any]) -> None:
    extra, missing = actual - wanted, wanted - actual
    if extra:
        raise Violation(kind, f"{where} is {_some(extra)}, which does not belong there")
    if missing:
        raise Violation(kind, f"{where} is not {_some(missing)}, which belongs there")


def simulate(seed: int, patches: Sequence[Change] = (), without: Sequence[Step] = ()) -> Outcome:
    """Simulate the job of one seed."""
    with patched(patches):
        return Job(seed, without).run()
