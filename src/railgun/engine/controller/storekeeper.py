"""Carry out the lifecycle machine's orders to the snapshot store, in a thread of its own (`Storekeeper`).

It collects what workers report of the snapshot under way, writes the manifest, and loads what a generation begins with.
A store can be slow; the controller never waits for it.

Users choose what a job begins with (`Snapshots`). No choice loses data: a job that begins afresh, or with an older
snapshot than the latest, uses numbers above all existing ones, and the previous latest snapshot is kept, whatever is
taken after it, until the next such choice.
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
    attempts_as_dicts,
    find_store,
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

RESERVED_GENERATIONS: Final = 100  # reserved at a time
TAKE_BACK_PAUSE_S: Final = 1.0  # between two attempts to delete an undecided manifest
DEFAULT_EVERY_S: Final = 10.0
DEFAULT_KEEP: Final = 3
MAX_EVERY_S: Final = 1e10
_KEPT: Final = "kept.json"


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Options of a job's snapshots: where and when to take them, and which one to begin with."""

    url: str | os.PathLike[str]
    every: float = DEFAULT_EVERY_S
    """Seconds between two snapshots."""
    keep: int = DEFAULT_KEEP
    """Number of snapshots to keep."""
    begin: str | os.PathLike[str] | int | None = None
    """The snapshot to begin with: its number; a directory of snapshots, for the latest in it; or both, as
    `DIRECTORY#NUMBER`. None: the latest of this job."""
    fresh: bool = False
    """Begin without state, even if there are snapshots."""
    allow_older: bool = False
    """If the latest snapshot is damaged, begin with the one before it."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """New names of steps, by their names in the snapshot."""
    drop: Collection[str] = frozenset()
    """Steps of the snapshot whose state is to be dropped."""

    def check(self) -> None:
        """Raise `ChoiceError` for invalid or contradictory options."""
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
        if not plain or not 0 < self.every < MAX_EVERY_S:  # also refuses NaN
            raise ChoiceError(f"seconds between two snapshots are more than 0, not {self.every!r}")
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise ChoiceError(f"at least one snapshot is kept, not {self.keep!r}")
        if self.fresh and (self.begin is not None or self.allow_older or self.rename or self.drop):
            raise ChoiceError(
                f"{FRESH()} loads nothing, so it goes with none of {BEGIN()}, {ALLOW_OLDER()}, {RENAME()}, {DROP()}"
            )
        _, number = parse_begin(self.begin)
        if number is not None and self.allow_older:
            raise ChoiceError(f"either snapshot {number}, or {ALLOW_OLDER()}: not both")


def _are_text(names: Iterable[Any]) -> bool:
    return all(isinstance(name, str) for name in names)


def parse_begin(begin: str | os.PathLike[str] | int | None) -> tuple[str | None, int | None]:
    """Return a directory (None: the job's own) and a number (None: the latest) of the snapshot to begin with.

    >>> parse_begin("7"), parse_begin("old#7"), parse_begin("old")
    ((None, 7), ('old', 7), ('old', None))
    """
    if begin is None:
        return None, None
    if isinstance(begin, os.PathLike):
        begin = os.fspath(begin)
    if isinstance(begin, bool) or not isinstance(begin, str | int):
        raise ChoiceError(
            f"{BEGIN()}: a snapshot to begin with is a number, DIRECTORY#NUMBER or a directory, not {begin!r}"
        )
    if isinstance(begin, int):
        directory, digits = "", str(begin)
    elif "#" in begin and not os.path.isdir(begin):
        directory, _, digits = begin.rpartition("#")
    elif begin.isdecimal():
        directory, digits = "", begin
    elif begin:
        return begin, None
    else:
        raise ChoiceError("a snapshot to begin with is a number, DIRECTORY#NUMBER or a directory")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        raise ChoiceError(
            f"a snapshot has a number, as in {directory or 'DIRECTORY'}#7, not {digits!r}"
        )
    return directory or None, int(digits)


class Storekeeper:
    """The snapshots of one job. It holds the lock of the store until it is closed."""

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
        self.source = self.store  # the store of the snapshot that the flow began with
        self._source_url = self.url
        # Of the last committed snapshot, or of the one that the flow began with.
        self.manifest: Manifest | None = None
        self.reports: dict[Worker, o.Saved] = {}
        self._farewells: list[o.Farewell] = []  # of workers that have left since the last snapshot
        self._in_manifest: list[o.Farewell] = []
        self._writing: Manifest | None = None
        self._began = 0.0
        self._full = True
        self.begun_with: tuple[str, int] | None = None  # store and number of the first snapshot
        self.tally = Tally()
        self._thread = ThreadPoolExecutor(1, "railgun-store")
        self.submit: Callable[[Callable[[], None]], object] = self._submit
        self.store.acquire()
        try:
            self.manifest = self._begin_with()
            self._kept = self._keep_newest()
            run = self.store.next_run()
            self._reserved = run.generation + RESERVED_GENERATIONS
            self.store.use_generation(self._reserved)
        except BaseException:
            self.store.release()
            raise
        if self.manifest is not None:
            self.begun_with = self.source.where(), self.manifest.snapshot
        self.generation = run.generation - 1
        """The last generation that was used, by this job or an earlier one."""
        self.saving = self._saving(run.snapshot - 1)
        """The snapshot state that the machine begins with."""

    def _submit(self, work: Callable[[], None]) -> None:
        """Let the store's thread do `work`, unless the program is ending and the thread takes no more work."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(work)

    def _saving(self, last: int) -> SnapshotRounds:
        if self.manifest is not None:
            # Numbers must also exceed that of a snapshot from another store.
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
        directory, number = parse_begin(chosen.begin)
        if directory is not None:
            self._source_url, self.source = find_store(directory, self.flow)
            if self.source.where() == self.store.where():
                self._source_url, self.source = self.url, self.store
        try:
            manifest = self._load(number)
        except DamagedError as error:
            raise DamagedError(f"{error} {self._advice(number)}") from error
        if manifest is None:
            if directory is not None:
                raise NoSnapshotsError(f"nothing was ever committed in {self.source.where()}")
            if chosen.rename or chosen.drop:
                raise ChoiceError(
                    f"there is no snapshot in {self.store.where()} whose steps could be renamed or dropped"
                )
            return None
        if manifest.finished:
            raise FinishedError(
                f"{self.flow!r} has finished, in snapshot {manifest.snapshot}: there is nothing left to do. "
                f"To run it again from the beginning: {FRESH()}{self._publish(manifest)}"
            )
        can_upgrade = [step.name for step in self.steps if step.version > 1]
        names = fit(
            *(manifest, self.steps, chosen.rename, chosen.drop),
            flow=self.flow,
            upgrades=can_upgrade,
        )
        parts = [replace(p, step=names[p.step]) for p in manifest.parts if p.step in names]
        sinks = [replace(s, step=names[s.step]) for s in manifest.sinks if s.step in names]
        streams = {
            names[step]: by_stream for step, by_stream in manifest.streams.items() if step in names
        }
        frontiers = {names[step]: at for step, at in manifest.frontiers.items() if step in names}
        reached = {
            names[step]: by_stream for step, by_stream in manifest.reached.items() if step in names
        }
        return replace(
            manifest,
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
            manifest = self.source.get(number)
        except MissingError as error:
            raise NoSnapshotsError(str(error)) from error
        self.source.check(manifest)
        self.source.pin(manifest)
        return manifest

    def _advice(self, number: int | None) -> str:
        if number is not None:
            return f"Begin with another than snapshot {number} ({BEGIN()}), or afresh ({FRESH()})."
        if self.chosen.allow_older:
            return f"Begin afresh ({FRESH()})."
        return f"To begin with an older snapshot: {ALLOW_OLDER()}. To begin afresh: {FRESH()}."

    def _keep_newest(self) -> Manifest | None:
        """Return the latest snapshot from which no job has gone on, which is kept."""
        first = None if self.source is not self.store else self.manifest
        path = f"{encode_name(self.flow)}/{_KEPT}"
        newest = next(iter(self.store.manifests([])), None)
        if newest is not None and (first is None or newest.snapshot > first.snapshot):
            self.store.disk.write(path, seal("kept", {"snapshot": newest.snapshot}))
            return newest
        try:
            kept = unseal("kept", self.store.disk.read(path), self.store.where(_KEPT))
            return self.store.get(kept["snapshot"])
        except (SnapshotError, StorageError, KeyError):
            return None

    def _publish(self, finished: Manifest) -> str:
        """Commit in every sink what the last snapshot decided. Return the errors as text for a message, or an empty
        text.

        The worker that should have committed may have died, and no other will. A later generation may have begun to
        commit and have fenced off the one that prepared the output. So this commits as a generation of its own, unless
        there are later snapshots, whose output must not be discarded.
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
        errors = [self._commit_in(step, step_tokens, place) for step, step_tokens in tokens.items()]
        text = "; ".join(filter(None, errors))
        return f". Not all of its output could be made visible: {text}" if text else ""

    def _commit_in(self, step: str, tokens: Sequence[Any], place: Place | None) -> str:
        """Commit tokens in a sink, as a generation at `place` or each by itself. Return an error text, or nothing."""
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

    # ------------------------------------------------------------ reports of workers

    def saved(self, worker: Worker, report: o.Saved) -> None:
        """Keep the report that a worker has saved its part."""
        self.reports[worker] = report

    def farewell(self, report: o.Farewell) -> None:
        """Keep the report of a worker that has left and handed over what it had to save."""
        self._farewells.append(report)

    def new_generation(self, generation: int) -> None:
        """Discard everything that is not committed, and reserve generations ahead of this one."""
        self.reports, self._farewells = {}, []
        ahead = generation + RESERVED_GENERATIONS
        if generation > self._reserved:
            # The store is slow, and no generation may be used unreserved.
            self._reserve(ahead)
        elif generation + RESERVED_GENERATIONS // 2 > self._reserved:
            self._do(lambda: self._reserve(ahead), lambda error: None)

    def _reserve(self, ahead: int) -> None:
        """Record durably that generations up to `ahead` may be used."""
        self.store.use_generation(ahead)
        self._reserved = max(self._reserved, ahead)

    def load(self) -> control.Load | None:
        """Return what a generation loads at its start, or None."""
        manifest = self.manifest
        if manifest is None:
            return None
        where = (self._source_url, self.source.flow)
        frontiers = tuple(manifest.frontiers.items())
        return control.Load(manifest.snapshot, manifest.parts, manifest.sinks, where, frontiers)

    # ------------------------------------------------------------ orders of the machine

    def record(self, order: o.Record, then: Callable[[str], None]) -> None:
        """Record that a snapshot begins; then call `then` with an error text, or an empty text."""
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
        """Commit a snapshot by writing its manifest; then call `then` with an error text, or an empty text.

        After a success the caller calls `written`.
        """
        manifest = self._manifest(order, generation)
        manifest = self._writing = replace(manifest, streams=streams, reached=reached)

        def commit() -> None:
            self.store.commit(manifest)
            if self._kept is not None:
                self.store.pin(self._kept)
            with contextlib.suppress(SnapshotError, StorageError):  # the next commit cleans again
                self.store.clean(self.chosen.keep)

        def run() -> None:
            try:
                commit()
            except UndecidedError as error:
                self._take_back_later(order.snapshot, str(error), then)
            except Exception as error:
                then(str(error) or repr(error))
            else:
                then("")

        self.submit(run)

    def _take_back_later(self, snapshot: int, why: str, then: Callable[[str], None]) -> None:
        """Try to delete a manifest until that succeeds durably; then call `then` with `why`.

        Until then the machine believes that the snapshot is being written, so no generation goes back to an older one.
        """

        def take_back() -> None:
            time.sleep(TAKE_BACK_PAUSE_S)
            try:
                self.store.take_back(snapshot)
            except UndecidedError:
                self._take_back_later(snapshot, why, then)
            except Exception as error:
                then(str(error) or repr(error))
            else:
                then(why)

        self.submit(take_back)

    def written(self) -> None:
        """Make the manifest that was just written the one to load from."""
        self.manifest, self.source, self._source_url = self._writing, self.store, self.url
        self._farewells = [f for f in self._farewells if f not in self._in_manifest]
        self.tally.count += 1

    def _manifest(self, order: o.Write, generation: int) -> Manifest:
        reports = list(self.reports.values())
        self._in_manifest = list(self._farewells)
        all_reports: list[o.Saved | o.Farewell] = [*reports, *self._in_manifest]
        previous_parts = () if self._full or self.manifest is None else self.manifest.parts
        new_parts = [
            replace(part, snapshot=order.snapshot)
            for report in all_reports
            for part in report.parts
        ]
        tokens: dict[str, SinkPart] = {repr(t): t for r in all_reports for t in r.tokens}
        phases = {
            name: max(dict(report.phases).get(name, 0.0) for report in reports)
            for name in {name for report in reports for name, _ in report.phases}
        }
        # All workers have received the same input before their cuts, so the highest watermark is right for all.
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
            parts=(*previous_parts, *new_parts),
            sinks=tuple(tokens.values()),
            steps=self.steps,
            phases=phases,
            frontiers=frontiers,
        )

    def tokens_of_departed(self) -> tuple[Any, ...]:
        """Return what departed workers prepared for the last committed snapshot and nobody has published."""
        return tuple(token for farewell in self._in_manifest for token in farewell.tokens)

    def tokens_for_one(self, together: Collection[str]) -> tuple[Any, ...]:
        """Return what one worker commits for all: the tokens of these steps, and those of departed workers."""
        assert self.manifest is not None
        shared = [token for token in self.manifest.sinks if token.step in together]
        return (
            *shared,
            *(token for token in self.tokens_of_departed() if token.step not in together),
        )

    def give_up(self, order: o.GiveUp) -> None:
        """Record why a snapshot has failed."""
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

    # ------------------------------------------------------------ for status and clean-up

    def status(self, saving: SnapshotRounds) -> dict[str, Any]:
        """Return the progress and results of snapshots as plain data, without reading from the store."""
        under_way = None
        if saving.busy:
            under_way = {
                "snapshot": saving.number,
                "phase": saving.phase,
                "full": saving.full,
                "why": saving.why,
                "seconds": round(max(0.0, time.time() - self._began), 3),
            }
        first = self.begun_with
        return {
            "where": self.store.where(),
            "every": self.chosen.every,
            "keep": self.chosen.keep,
            "from": None if first is None else {"where": first[0], "snapshot": first[1]},
            "last": None if self.manifest is None else summary_of(self.manifest),
            "under_way": under_way,
            "count": self.tally.count,
            "failures": self.tally.failures,
            "last_failure": self.tally.last_failure,
        }

    def attempts(self) -> Future[list[dict[str, Any]]]:
        """Return how each snapshot ended, newest first; the storekeeper's thread reads them."""
        try:
            return self._thread.submit(attempts_as_dicts, self.store)
        except RuntimeError:  # the job is closed
            done: Future[list[dict[str, Any]]] = Future()
            done.set_result(attempts_as_dicts(self.store))
            return done

    def release(self) -> None:
        """Release the store's lock when all pending writes are done."""
        try:
            released = self._thread.submit(self.store.release)
        except RuntimeError:  # the program is ending, so the thread takes no more work
            self.close()
        else:
            released.result()

    def close(self) -> None:
        """End the thread, and release the store's lock."""
        self._thread.shutdown(wait=True)
        self.store.release()


@dataclass(slots=True)
class Tally:
    """Counts of what this job has done so far."""

    count: int = 0
    failures: int = 0
    last_failure: dict[str, Any] | None = None


def summary_of(manifest: Manifest) -> dict[str, Any]:
    """Return figures of a committed snapshot: rows and bytes written for it, and the bytes of all its files."""
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
    """The flow has finished, so there is nothing left to do."""

    exit_code = ExitCode.FINISHED
    kind = "finished"


class ChoiceError(SnapshotError):
    """The options of snapshots are invalid."""

    exit_code = ExitCode.USAGE
    kind = "usage"


def steps_of(plan: Plan) -> tuple[StepInfo, ...]:
    """Return the steps that have state, and the sinks."""
    steps: dict[str, StepInfo] = {}
    for stage in plan.stages:
        for step in (*stage.ports, *stage.steps):
            if step.kind in STATEFUL_KINDS:
                version = 1 + len(step.options.get("upgrades", ()))
                steps[step.name] = StepInfo(step.name, step.kind, version, _layout(step))
    return tuple(steps.values())


def _layout(step: Step) -> dict[str, Any] | None:
    """Return the layout of a source as it will be read from a snapshot; None for other steps.

    Raises `SourceError` for an error of the source, and `FlowError` for a layout that is not JSON.
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


STATEFUL_KINDS: Final[Sequence[str]] = ("source", "stateful_map", "reduce", "stateful", "sink")
