"""The storekeeper: carries out what the lifecycle machine wants of the snapshot store, in a thread of its own.

It keeps what workers report of the snapshot under way, puts the manifest together, and knows what a generation begins
with. A store can be slow; the controller never waits for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

from railgun.core import orders as o
from railgun.core.placement import Worker
from railgun.core.saving import Saving
from railgun.flow.plan import Plan
from railgun.snapshots.disk import Disk
from railgun.snapshots.errors import SnapshotError
from railgun.snapshots.fit import fit
from railgun.snapshots.manifest import FORMAT, Manifest, SinkPart, StepInfo
from railgun.snapshots.store import SnapshotStore
from railgun.wire import control

GENERATIONS: Final = 100  # that a job may use until it asks again
EVERY: Final = 10.0
KEEP: Final = 3


@dataclass(frozen=True, slots=True)
class Snapshots:
    """How a job takes snapshots, and what it begins with."""

    url: str
    every: float = EVERY
    """Seconds between two."""
    keep: int = KEEP
    """How many are kept."""
    begin: str | int | None = None
    """A snapshot to begin with: its number, or where another flow's snapshots are; None: the latest."""
    fresh: bool = False
    """Begin with nothing, whatever there is."""
    allow_older: bool = False
    """If the latest is damaged, begin with the one before."""
    rename: Mapping[str, str] = field(default_factory=dict)
    drop: frozenset[str] = frozenset()


class Storekeeper:
    """The snapshots of one job, which has the store to itself until it is closed."""

    def __init__(
        self, plan: Plan, chosen: Snapshots, flow: str, *, disk: Disk | None = None
    ) -> None:
        self.chosen = chosen
        self.flow = flow
        self.steps = steps_of(plan)
        self.url = absolute(chosen.url)
        self.store = SnapshotStore(self.url if disk is None else disk, flow)
        self.source = self.store  # where what the flow began with is
        self._source_url = self.url
        self.manifest: Manifest | None = (
            None  # of the last one committed, or what the flow began with
        )
        self._reports: dict[Worker, o.Saved] = {}
        self._left: list[o.Farewell] = []  # of workers that have left since the last one
        self._in_manifest: list[o.Farewell] = []
        self._writing: Manifest | None = None
        self._began = 0.0
        self._full = True
        self._thread = ThreadPoolExecutor(1, "railgun-store")
        self.submit: Callable[[Callable[[], None]], object] = self._thread.submit
        self.store.acquire()
        try:
            self.manifest = self._begin_with()
            run = self.store.next_run()
            self._ahead = run.generation + GENERATIONS  # up to here nobody else will use them
            self.store.use_generation(self._ahead)
        except BaseException:
            self.store.release()
            raise
        self.generation = run.generation - 1
        """The last one that was used, by this job or an earlier one."""
        self.saving = self._saving(run.snapshot - 1)
        """What the machine begins with."""

    def _saving(self, last: int) -> Saving:
        if self.manifest is not None:  # also above those of another store, if it is of one
            last = max(last, self.manifest.snapshot)
        saving = Saving(int(self.chosen.every * 1e6), last)
        if self.manifest is not None:
            saving.committed = self.manifest.snapshot
            saving.foreign = self.source is not self.store
            saving.keys = saving.rows = sum(part.rows for part in self.manifest.parts)
        return saving

    def _begin_with(self) -> Manifest | None:
        chosen = self.chosen
        if chosen.fresh:
            return None
        if isinstance(chosen.begin, str):
            url, _, number = chosen.begin.rpartition("#")
            self._source_url = absolute(url or chosen.begin)
            self.source = SnapshotStore(self._source_url, self.flow)
            found = self.source.get(int(number)) if url else self.source.latest(chosen.allow_older)
            if found is None:
                raise SnapshotError(f"there is no snapshot of {self.flow!r} in {chosen.begin}")
        elif chosen.begin is not None:
            found = self.store.get(chosen.begin)
        else:
            found = self.store.latest(chosen.allow_older)
        if found is None:
            return None
        if found.finished:
            raise FinishedError(
                f"{self.flow!r} has come to its end, in snapshot {found.snapshot}: there is nothing left to do; "
                "to do it again, begin afresh (--fresh)"
            )
        # A version is one upgrade more than the one before, so there is one for each.
        upgrades = [step.name for step in self.steps if step.version > 1]
        names = fit(found, self.steps, chosen.rename, chosen.drop, upgrades=upgrades)
        parts = [replace(p, step=names[p.step]) for p in found.parts if p.step in names]
        sinks = [replace(s, step=names.get(s.step, s.step)) for s in found.sinks]
        return replace(found, parts=tuple(parts), sinks=tuple(sinks))

    # ------------------------------------------------------------ what workers say

    def saved(self, worker: Worker, report: o.Saved) -> None:
        """A worker has saved its part."""
        self._reports[worker] = report

    def farewell(self, report: o.Farewell) -> None:
        """A worker has left, and handed over what it had to save."""
        self._left.append(report)

    def new_generation(self, generation: int) -> None:
        """All that was not committed is void."""
        self._reports, self._left = {}, []
        if generation + GENERATIONS // 2 > self._ahead:
            ahead = generation + GENERATIONS

            def reserve() -> None:
                self.store.use_generation(ahead)
                self._ahead = ahead

            self._do(reserve, lambda error: None)  # if it fails, the next generation tries again

    def load(self) -> control.Load | None:
        """What a generation begins with."""
        manifest = self.manifest
        if manifest is None:
            return None
        names = {part.step: part.step for part in manifest.parts}
        where = (self._source_url, self.flow)
        return control.Load(manifest.snapshot, manifest.parts, manifest.sinks, names, where)

    # ------------------------------------------------------------ what the machine wants

    def record(self, order: o.Record, then: Callable[[str], None]) -> None:
        """Write down that a snapshot begins."""
        self._reports = {}
        self._began, self._full = time.time(), order.full
        self._do(lambda: self.store.begun(order.snapshot, order.full, order.why), then)

    def write(self, order: o.Write, generation: int, then: Callable[[str], None]) -> None:
        """Write the manifest: the commit. When it is done, `written` is to be called."""
        manifest = self._writing = self._manifest(order, generation)

        def commit() -> None:
            self.store.commit(manifest)
            with contextlib.suppress(SnapshotError):  # what is too much is dropped the next time
                self.store.clean(self.chosen.keep)

        self._do(commit, then)

    def written(self) -> None:
        """The manifest counts."""
        self.manifest, self.source, self._source_url = self._writing, self.store, self.url
        self._left = [left for left in self._left if left not in self._in_manifest]

    def _manifest(self, order: o.Write, generation: int) -> Manifest:
        reports = list(self._reports.values())
        self._in_manifest = list(self._left)
        said: list[o.Saved | o.Farewell] = [*reports, *self._in_manifest]
        before = () if self._full or self.manifest is None else self.manifest.parts
        added = [replace(part, snapshot=order.snapshot) for one in said for part in one.parts]
        tokens: dict[str, SinkPart] = {repr(t): t for one in said for t in one.tokens}
        phases = {
            name: max(dict(report.phases).get(name, 0.0) for report in reports)
            for name in {name for report in reports for name, _ in report.phases}
        }
        return Manifest(
            format=FORMAT,
            flow=self.flow,
            snapshot=order.snapshot,
            generation=generation,
            workers=len(reports),
            full=self._full,
            finished=order.finished,
            began=self._began,
            committed=time.time(),
            parts=(*before, *added),
            sinks=tuple(tokens.values()),
            steps=self.steps,
            phases=phases,
        )

    def orphans(self) -> tuple[Any, ...]:
        """What workers that left prepared for the snapshot that was just committed, and nobody has published."""
        return tuple(token for left in self._in_manifest for token in left.tokens)

    def give_up(self, order: o.GiveUp) -> None:
        """Write down why a snapshot has failed."""
        self._do(lambda: self.store.failed(order.snapshot, order.why), lambda error: None)

    def _do(self, work: Callable[[], Any], then: Callable[[str], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                then(str(error) or repr(error))
            else:
                then("")

        self.submit(run)

    def close(self) -> None:
        """Let go of the store."""
        self._thread.shutdown(wait=True)
        self.store.release()


class FinishedError(SnapshotError):
    """The flow has come to its end."""


def steps_of(plan: Plan) -> tuple[StepInfo, ...]:
    """The steps that have state, and those that write."""
    found: dict[str, StepInfo] = {}
    for stage in plan.stages:
        for step in (*stage.ports, *stage.steps):
            if step.kind in KINDS:
                version = 1 + len(step.options.get("upgrades", ()))
                found[step.name] = StepInfo(step.name, step.kind, version)
    return tuple(found.values())


KINDS: Final[Sequence[str]] = ("source", "stateful_map", "reduce", "stateful", "sink")


def absolute(url: str) -> str:
    """A path as it is from everywhere; a URL as it is."""
    return url if "://" in url else os.path.abspath(url)
