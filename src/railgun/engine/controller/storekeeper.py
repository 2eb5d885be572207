"""The storekeeper: carries out what the lifecycle machine wants of the snapshot store, in a thread of its own.

It keeps what workers report of the snapshot under way, puts the manifest together, and knows what a generation begins
with. A store can be slow; the controller never waits for it.

What a job begins with is chosen by people (`Snapshots`). Nothing of what there is gets lost by a choice: a job that
begins afresh, or with an older snapshot than the latest, takes numbers above all there are, and the latest snapshot of
before is kept, whatever comes after it, until the next such choice.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

from railgun.engine.controller.snapshot_directory import (
    NoSnapshotsError,
    absolute,
    find_store,
    told_attempts,
)
from railgun.engine.operators.calls import NO_PART, SourceCall, TokenCall
from railgun.engine.operators.functions import check_done
from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.lifecycle.snapshot_rounds import SnapshotRounds
from railgun.engine.protocol.placement import Worker
from railgun.engine.snapshots.errors import DamagedError, SnapshotError, UndecidedError
from railgun.engine.snapshots.fit import fit
from railgun.engine.snapshots.manifest import FORMAT, Manifest, SinkPart, StepInfo, seal, unseal
from railgun.engine.snapshots.option_names import ALLOW_OLDER, BEGIN, DROP, FRESH, RENAME
from railgun.engine.snapshots.option_names import drop as drop_of
from railgun.engine.snapshots.option_names import rename as rename_as
from railgun.engine.snapshots.store import SnapshotStore, encode_name
from railgun.engine.worker import control_messages as control
from railgun.engine.worker.liveness import watched
from railgun.errors import ExitCode, pass_interrupt, represent
from railgun.flows.errors import FlowError
from railgun.flows.plan import Plan
from railgun.flows.sink import Place, TwoPhaseSink
from railgun.flows.step import Step
from railgun.storage.errors import MissingError, StorageError
from railgun.storage.object_store import Disk

GENERATIONS: Final = 100  # that a job may use until it asks again
UNDECIDED_S: Final = 1.0  # between two attempts to take a manifest back
EVERY: Final = 10.0
KEEP: Final = 3
FOR_EVER: Final = 1e10  # seconds
_KEPT: Final = "kept.json"


@dataclass(frozen=True, slots=True)
class Snapshots:
    """How a job takes snapshots, and what it begins with."""

    url: str | os.PathLike[str]
    every: float = EVERY
    """Seconds between two."""
    keep: int = KEEP
    """How many are kept."""
    begin: str | os.PathLike[str] | int | None = None
    """A snapshot to begin with: its number; a directory of snapshots, of which it is the latest; or both, as
    `DIRECTORY#NUMBER`. None: the latest there is."""
    fresh: bool = False
    """Begin with nothing, whatever there is."""
    allow_older: bool = False
    """If the latest is damaged, begin with the one before."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """What steps of the snapshot are called in the flow now, if that is something else."""
    drop: Collection[str] = frozenset()
    """Steps of the snapshot whose state is not wanted any more."""

    def check(self) -> None:
        """Refuse what cannot be, or contradicts itself."""
        if not isinstance(self.url, str | os.PathLike):
            raise ChoiceError(
                f"snapshots are kept in a directory, or at a URL, not in {self.url!r}"
            )
        if not isinstance(self.rename, Mapping) or not _are_text(
            (*self.rename, *self.rename.values())
        ):
            raise ChoiceError(
                f"steps are renamed from names in the snapshot to names in the flow, as {rename_as('old', 'new')}, "
                f"not {self.rename!r}"
            )
        if (
            isinstance(self.drop, str)
            or not isinstance(self.drop, Collection)
            or not _are_text(self.drop)
        ):
            raise ChoiceError(
                f"steps are dropped by a set of their names, as {drop_of('step')}, not {self.drop!r}"
            )
        plain = isinstance(self.every, int | float)
        if not plain or not 0 < self.every < FOR_EVER:  # NaN is neither
            raise ChoiceError(f"seconds between two snapshots are more than 0, not {self.every!r}")
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise ChoiceError(f"at least one snapshot is kept, not {self.keep!r}")
        if self.fresh and (self.begin is not None or self.allow_older or self.rename or self.drop):
            raise ChoiceError(
                f"{FRESH()} loads nothing, so it goes with none of {BEGIN()}, {ALLOW_OLDER()}, {RENAME()}, {DROP()}"
            )
        _, number = where_to_begin(self.begin)
        if number is not None and self.allow_older:
            raise ChoiceError(f"either snapshot {number}, or {ALLOW_OLDER()}: not both")


def _are_text(names: Iterable[Any]) -> bool:
    return all(isinstance(name, str) for name in names)


def where_to_begin(told: str | os.PathLike[str] | int | None) -> tuple[str | None, int | None]:
    """What to begin with, as a directory (None: the job's own) and a number (None: the latest).

    >>> where_to_begin("7"), where_to_begin("old#7"), where_to_begin("old")
    ((None, 7), ('old', 7), ('old', None))
    """
    if told is None:
        return None, None
    if isinstance(told, os.PathLike):
        told = os.fspath(told)
    if isinstance(told, bool) or not isinstance(told, str | int):
        raise ChoiceError(
            f"{BEGIN()}: a snapshot to begin with is a number, DIRECTORY#NUMBER or a directory, not {told!r}"
        )
    if isinstance(told, int):
        directory, digits = "", str(told)
    elif "#" in told and not os.path.isdir(told):
        directory, _, digits = told.rpartition("#")
    elif told.isdecimal():
        directory, digits = "", told
    elif told:
        return told, None
    else:
        raise ChoiceError("a snapshot to begin with is a number, DIRECTORY#NUMBER or a directory")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        raise ChoiceError(
            f"a snapshot has a number, as in {directory or 'DIRECTORY'}#7, not {digits!r}"
        )
    return directory or None, int(digits)


class Storekeeper:
    """The snapshots of one job, which has the store to itself until it is closed."""

    def __init__(
        self,
        plan: Plan,
        chosen: Snapshots,
        flow: str,
        *,
        disk: Disk | None = None,
        hang_after_s: float = 30.0,
    ) -> None:
        chosen.check()
        self._hang_after_s = hang_after_s
        self.chosen = chosen
        self.flow = flow
        self.plan = plan
        self.steps = steps_of(plan)
        self.url = absolute(os.fspath(chosen.url))
        self.store = SnapshotStore(self.url if disk is None else disk, flow)
        self.source = self.store  # where what the flow began with is
        self._source_url = self.url
        self.manifest: Manifest | None = (
            None  # of the last one committed, or what the flow began with
        )
        self.reports: dict[Worker, o.Saved] = {}
        self._left: list[o.Farewell] = []  # of workers that have left since the last one
        self._in_manifest: list[o.Farewell] = []
        self._writing: Manifest | None = None
        self._began = 0.0
        self._full = True
        self.begun_with: tuple[str, int] | None = None  # where, and its number
        self.tally = Tally()
        self._thread = ThreadPoolExecutor(1, "railgun-store")
        self.submit: Callable[[Callable[[], None]], object] = self._submit
        self.store.acquire()
        try:
            self.manifest = self._begin_with()
            self._kept = self._keep_newest()
            run = self.store.next_run()
            self._ahead = run.generation + GENERATIONS
            self.store.use_generation(self._ahead)
        except BaseException:
            self.store.release()
            raise
        if self.manifest is not None:
            self.begun_with = self.source.where(), self.manifest.snapshot
        self.generation = run.generation - 1
        """The last one that was used, by this job or an earlier one."""
        self.saving = self._saving(run.snapshot - 1)
        """What the machine begins with."""

    def _submit(self, work: Callable[[], None]) -> None:
        """Let the store's thread do something; while the program ends there is none, and the job ends with it."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(work)

    def _saving(self, last: int) -> SnapshotRounds:
        if self.manifest is not None:  # also above those of another store, if it is of one
            last = max(last, self.manifest.snapshot)
        saving = SnapshotRounds(int(self.chosen.every * 1e6), last)
        if self.manifest is not None:
            saving.committed = self.manifest.snapshot
            saving.foreign = self.source is not self.store
            saving.keys = saving.rows = sum(part.rows for part in self.manifest.parts)
        return saving

    def _begin_with(self) -> Manifest | None:
        chosen = self.chosen
        if chosen.fresh:
            return None
        directory, number = where_to_begin(chosen.begin)
        if directory is not None:
            self._source_url, self.source = find_store(directory, self.flow)
            if self.source.where() == self.store.where():
                self._source_url, self.source = self.url, self.store
        try:
            found = self._load(number)
        except DamagedError as error:
            raise DamagedError(f"{error} {self._way_out(number)}") from error
        if found is None:
            if directory is not None:
                raise NoSnapshotsError(f"nothing was ever committed in {self.source.where()}")
            if chosen.rename or chosen.drop:
                raise ChoiceError(
                    f"there is no snapshot in {self.store.where()} whose steps could be renamed or dropped"
                )
            return None
        if found.finished:
            raise FinishedError(
                f"{self.flow!r} has come to its end, in snapshot {found.snapshot}: there is nothing left to do. "
                f"To do it all again: {FRESH()}{self._publish(found)}"
            )
        can_upgrade = [step.name for step in self.steps if step.version > 1]
        names = fit(
            *(found, self.steps, chosen.rename, chosen.drop), flow=self.flow, upgrades=can_upgrade
        )
        parts = [replace(p, step=names[p.step]) for p in found.parts if p.step in names]
        sinks = [replace(s, step=names[s.step]) for s in found.sinks if s.step in names]
        streams = {names[step]: told for step, told in found.streams.items() if step in names}
        frontiers = {names[step]: at for step, at in found.frontiers.items() if step in names}
        reached = {names[step]: told for step, told in found.reached.items() if step in names}
        return replace(
            found,
            parts=tuple(parts),
            sinks=tuple(sinks),
            streams=streams,
            frontiers=frontiers,
            reached=reached,
        )

    def _load(self, number: int | None) -> Manifest | None:
        if number is None:
            return self.source.latest(self.chosen.allow_older)
        try:
            found = self.source.get(number)
        except MissingError as error:
            raise NoSnapshotsError(str(error)) from error
        self.source.check(found)
        self.source.pin(found)
        return found

    def _way_out(self, number: int | None) -> str:
        if number is not None:
            return f"Begin with another than snapshot {number} ({BEGIN()}), or afresh ({FRESH()})."
        if self.chosen.allow_older:
            return f"Begin afresh ({FRESH()})."
        return f"To begin with an older one: {ALLOW_OLDER()}. To begin anew: {FRESH()}."

    def _keep_newest(self) -> Manifest | None:
        """The latest snapshot that this job, or an earlier one, has not gone on from: it is kept."""
        begun = None if self.source is not self.store else self.manifest
        path = f"{encode_name(self.flow)}/{_KEPT}"
        newest = next(iter(self.store.manifests([])), None)
        if newest is not None and (begun is None or newest.snapshot > begun.snapshot):
            self.store.disk.write(path, seal("kept", {"snapshot": newest.snapshot}))
            return newest
        try:
            told = unseal("kept", self.store.disk.read(path), self.store.where(_KEPT))
            return self.store.get(told["snapshot"])
        except (SnapshotError, StorageError, KeyError):
            return None

    def _publish(self, finished: Manifest) -> str:
        """Carry out in every sink what the last snapshot decided; return what is wrong, if something is.

        Whoever was to do it may have died before, and nobody else will. A later generation may have begun to do it and
        have fenced the one that prepared the output. So it is done as a generation of its own, unless there are later
        snapshots: their output must not be thrown away.
        """
        newest = next(iter(self.store.manifests([])), None)
        is_newest = newest is not None and newest.snapshot == finished.snapshot
        place: Place | None = None
        if self.source is self.store and is_newest:
            generation = self.store.next_run().generation
            place = Place(self.plan.flow, "", 0, generation, transactional=True)
            place = replace(place, store=self.store.identity())
        tokens: dict[str, list[Any]] = {}
        for part in finished.sinks:
            if part.step not in self.chosen.drop:
                step = self.chosen.rename.get(part.step, part.step)
                tokens.setdefault(step, []).append(part.token)
        wrong = [self._publish_to(step, mine, place) for step, mine in tokens.items()]
        told = "; ".join(filter(None, wrong))
        return f". Not all of its output can be made visible, though: {told}" if told else ""

    def _publish_to(self, step: str, tokens: Sequence[Any], place: Place | None) -> str:
        """Commit these tokens, as a generation at `place` or each for itself; return what is wrong, if something is."""
        sink = self.plan.sinks.get(step)
        if not isinstance(sink, TwoPhaseSink):
            return f"the flow has no sink {step!r} that could: {rename_as(step, 'NAME')}, or {drop_of(step)}"

        def commit_all() -> None:
            if place is not None:
                with TokenCall(step, sink, "recover", tokens):
                    check_done(sink.recover_at(replace(place, step=step), tokens))
                return
            for token in tokens:
                with TokenCall(step, sink, "commit", [token]):
                    check_done(sink.commit(token))

        try:
            watched(commit_all, self._hang_after_s)
        except BaseException as error:
            pass_interrupt(error)
            return str(error)
        return ""

    # ------------------------------------------------------------ what workers say

    def saved(self, worker: Worker, report: o.Saved) -> None:
        """A worker has saved its part."""
        self.reports[worker] = report

    def farewell(self, report: o.Farewell) -> None:
        """A worker has left, and handed over what it had to save."""
        self._left.append(report)

    def new_generation(self, generation: int) -> None:
        """All that was not committed is void."""
        self.reports, self._left = {}, []
        ahead = generation + GENERATIONS
        if generation > self._ahead:  # the store has not answered for long; none is used twice
            self._use(ahead)
        elif generation + GENERATIONS // 2 > self._ahead:
            self._do(lambda: self._use(ahead), lambda error: None)

    def _use(self, ahead: int) -> None:
        """Write down that generations up to this one may be used."""
        self.store.use_generation(ahead)
        self._ahead = max(self._ahead, ahead)

    def load(self) -> control.Load | None:
        """What a generation begins with."""
        manifest = self.manifest
        if manifest is None:
            return None
        where = (self._source_url, self.source.flow)
        frontiers = tuple(manifest.frontiers.items())
        return control.Load(manifest.snapshot, manifest.parts, manifest.sinks, where, frontiers)

    # ------------------------------------------------------------ what the machine wants

    def record(self, order: o.Record, then: Callable[[str], None]) -> None:
        """Write down that a snapshot begins."""
        self.reports = {}
        self._began, self._full = time.time(), order.full
        self._do(lambda: self.store.begun(order.snapshot, order.full, order.why), then)

    def write(
        self,
        order: o.Write,
        generation: int,
        then: Callable[[str], None],
        streams: Mapping[str, Mapping[str, int]],
        reached: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Write the manifest: the commit. When it is done, `written` is to be called."""
        manifest = self._manifest(order, generation)
        manifest = self._writing = replace(manifest, streams=streams, reached=reached)

        def commit() -> None:
            self.store.commit(manifest)
            if self._kept is not None:
                self.store.pin(self._kept)
            with contextlib.suppress(
                SnapshotError, StorageError
            ):  # what is too much is dropped the next time
                self.store.clean(self.chosen.keep)

        def run() -> None:
            try:
                commit()
            except UndecidedError as error:
                self._decide(order.snapshot, str(error), then)
            except Exception as error:
                then(str(error) or repr(error))
            else:
                then("")

        self.submit(run)

    def _decide(self, snapshot: int, why: str, then: Callable[[str], None]) -> None:
        """Take a manifest back, however often that fails; call `then` with `why` when it is gone for good.

        Until then the snapshot is being written, as far as the machine knows, and nobody goes back to an older one.
        """

        def take_back() -> None:
            time.sleep(UNDECIDED_S)
            try:
                self.store.take_back(snapshot)
            except UndecidedError:
                self._decide(snapshot, why, then)
            except Exception as error:
                then(str(error) or repr(error))
            else:
                then(why)

        self.submit(take_back)

    def written(self) -> None:
        """The manifest counts."""
        self.manifest, self.source, self._source_url = self._writing, self.store, self.url
        self._left = [left for left in self._left if left not in self._in_manifest]
        self.tally.count += 1

    def _manifest(self, order: o.Write, generation: int) -> Manifest:
        reports = list(self.reports.values())
        self._in_manifest = list(self._left)
        said: list[o.Saved | o.Farewell] = [*reports, *self._in_manifest]
        before = () if self._full or self.manifest is None else self.manifest.parts
        added = [replace(part, snapshot=order.snapshot) for one in said for part in one.parts]
        tokens: dict[str, SinkPart] = {repr(t): t for one in said for t in one.tokens}
        phases = {
            name: max(dict(report.phases).get(name, 0.0) for report in reports)
            for name in {name for report in reports for name, _ in report.phases}
        }
        # All workers have heard the same before their cuts; who is through with it first is right for all.
        frontiers: dict[str, int] = {}
        for report in reports:
            for step, at in report.frontiers:
                frontiers[step] = max(at, frontiers.get(step, at))
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
            frontiers=frontiers,
        )

    def orphans(self) -> tuple[Any, ...]:
        """What workers that left prepared for the snapshot that was just committed, and nobody has published."""
        return tuple(token for left in self._in_manifest for token in left.tokens)

    def tokens_for_one(self, together: Collection[str]) -> tuple[Any, ...]:
        """Return what one worker commits for others: all tokens of these steps, and those of workers that left."""
        assert self.manifest is not None
        shared = [token for token in self.manifest.sinks if token.step in together]
        return (*shared, *(token for token in self.orphans() if token.step not in together))

    def give_up(self, order: o.GiveUp) -> None:
        """Write down why a snapshot has failed."""
        self.tally.failures += 1
        self.tally.last_failure = {"snapshot": order.snapshot, "at": time.time(), "why": order.why}
        self._do(lambda: self.store.failed(order.snapshot, order.why), lambda error: None)

    def _do(self, work: Callable[[], Any], then: Callable[[str], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                pass_interrupt(error)
                then(str(error) or repr(error))
            else:
                then("")

        self.submit(run)

    # ------------------------------------------------------------ what people ask

    def status(self, saving: SnapshotRounds) -> dict[str, Any]:
        """How snapshots fare, as plain data; nothing is read for it."""
        under_way = None
        if saving.busy:
            under_way = {
                "snapshot": saving.number,
                "phase": saving.phase,
                "full": saving.full,
                "why": saving.why,
                "seconds": round(max(0.0, time.time() - self._began), 3),
            }
        begun = self.begun_with
        return {
            "where": self.store.where(),
            "every": self.chosen.every,
            "keep": self.chosen.keep,
            "from": None if begun is None else {"where": begun[0], "snapshot": begun[1]},
            "last": None if self.manifest is None else told_of(self.manifest),
            "under_way": under_way,
            "count": self.tally.count,
            "failures": self.tally.failures,
            "last_failure": self.tally.last_failure,
        }

    def attempts(self) -> Future[list[dict[str, Any]]]:
        """What became of each snapshot, newest first; it is read by the storekeeper's thread."""
        try:
            return self._thread.submit(told_attempts, self.store)
        except RuntimeError:  # the job is closed
            done: Future[list[dict[str, Any]]] = Future()
            done.set_result(told_attempts(self.store))
            return done

    def release(self) -> None:
        """Let another job have the store, when all that is being written to it is written."""
        try:
            released = self._thread.submit(self.store.release)
        except RuntimeError:  # the program ends: the thread takes nothing new
            self.close()
        else:
            released.result()

    def close(self) -> None:
        """Let go of the store, and end the thread."""
        self._thread.shutdown(wait=True)
        self.store.release()


@dataclass(slots=True)
class Tally:
    """What this job has done so far."""

    count: int = 0
    failures: int = 0
    last_failure: dict[str, Any] | None = None


def told_of(manifest: Manifest) -> dict[str, Any]:
    """A committed snapshot, in figures: rows and bytes that were written for it, and bytes of all it is made of."""
    written = [part for part in manifest.parts if part.snapshot == manifest.snapshot]
    return {
        "snapshot": manifest.snapshot,
        "full": manifest.full,
        "at": manifest.committed,
        "age": round(max(0.0, time.time() - manifest.committed), 3),
        "seconds": round(max(0.0, manifest.committed - manifest.began), 3),
        "rows": sum(part.rows for part in written),
        "size": sum(part.size for part in written),
        "total": manifest.size,
        "phases": {name: round(seconds, 6) for name, seconds in manifest.phases.items()},
    }


class FinishedError(SnapshotError):
    """The flow has come to its end."""

    exit_code = ExitCode.FINISHED
    kind = "finished"


class ChoiceError(SnapshotError):
    """What is asked of snapshots makes no sense."""

    exit_code = ExitCode.USAGE
    kind = "usage"


def steps_of(plan: Plan) -> tuple[StepInfo, ...]:
    """The steps that have state, and those that write."""
    found: dict[str, StepInfo] = {}
    for stage in plan.stages:
        for step in (*stage.ports, *stage.steps):
            if step.kind in KINDS:
                version = 1 + len(step.options.get("upgrades", ()))
                found[step.name] = StepInfo(step.name, step.kind, version, _layout(step))
    return tuple(found.values())


def _layout(step: Step) -> dict[str, Any] | None:
    """Return the layout of a source as it reads after it was saved; None for other steps.

    Raises `SourceError` for what the source raises, `FlowError` for a layout that is not JSON.
    """
    if step.kind != "source":
        return None
    source = step.options["source"]
    with SourceCall(step.name, source, "layout", NO_PART, None):
        layout = source.layout()
        if isinstance(layout, Mapping):
            layout = dict(layout)
    if layout is None:
        return None
    try:
        saved: dict[str, Any] = json.loads(json.dumps(dict(layout), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise FlowError(
            f"{step.where}: the layout of source {step.name!r} is a dict of text, numbers, lists and dicts, as JSON "
            f"has them, not {represent(layout):.200}: {error}"
        ) from error
    return saved


KINDS: Final[Sequence[str]] = ("source", "stateful_map", "reduce", "stateful", "sink")
