"""End a batch run in a snapshot, from which the flow goes on live.

Rules:

1. A directory that has snapshots of the flow is refused: the flow would go on from the new snapshot, and everything it
   did since the others would be lost.
2. Tasks write the state of their keys, and report which files they wrote. Files of a task that failed, or of the other
   run of a task that ran twice, are in no report. The manifest is written last, when all tasks are done: then the
   snapshot exists.
3. For every source it must be known where it goes on. For a source that was read itself, the tasks save the positions.
   For a source that a DataFrame replaced, the caller passes them; they cannot be derived from the DataFrame.
4. Tasks prepare the output of sinks; it is named in the manifest, and committed after it. If this process dies in
   between, the live flow commits it when it begins, as it does after any failure.
5. Calls of sinks in this process (`recover` before the run, `commit` after it) are watched as on workers. A call that
   does not return for `hang_after_s` seconds ends the run with an error that names step, method, token and stack. Other
   sinks have their turn all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from pyspark.errors import PySparkException

from railgun.engine.batch.errors import BatchError
from railgun.engine.batch.stages import Save
from railgun.engine.controller.snapshot_directory import absolute
from railgun.engine.controller.storekeeper import steps_of
from railgun.engine.operators.calls import TokenCall
from railgun.engine.operators.committing import commit_calls
from railgun.engine.operators.functions import check_done
from railgun.engine.protocol.frontier import MIN
from railgun.engine.snapshots.manifest import FORMAT, Manifest, Part, SinkPart
from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.worker.liveness import watched
from railgun.errors import pass_interrupt
from railgun.flows.flow import Flow
from railgun.flows.plan import Plan
from railgun.flows.sink import Place, TwoPhaseSink
from railgun.flows.source import is_empty
from railgun.hashing import hash_keys
from railgun.sources.directory import Directory
from railgun.sources.streams import Streams
from railgun.spark.failure import of_task
from railgun.spark.inputs import Done, Input

HANG_AFTER_S: Final = 30.0
"""Seconds after which a call of a sink counts as hung, as `Settings.hang_after`."""


@dataclass(slots=True)
class FirstSnapshot:
    """The first snapshot of a directory, while it is made."""

    store: SnapshotStore
    save: Save
    began: float
    committed: bool = False

    def commit(
        self, plan: Plan, reports: Sequence[dict[str, Any]], more_parts: Sequence[Part] = ()
    ) -> list[SinkPart]:
        """Commit the snapshot from the reports of all tasks, when all files are written; return the tokens of sinks."""
        parts = [*(Part(**report["part"]) for report in reports if "part" in report), *more_parts]
        tokens = [
            SinkPart(report["sink"], report["token"]) for report in reports if "token" in report
        ]
        frontiers: dict[str, int] = {}
        for report in reports:
            if "frontier" in report:
                step, at = report["frontier"], report["at"]
                frontiers[step] = max(at, frontiers.get(step, at))
        manifest = Manifest(
            FORMAT,
            self.save.flow,
            self.save.snapshot,
            self.save.generation,
            workers=len({part.worker for part in parts}) or 1,
            full=True,
            finished=False,
            began=self.began,
            committed=time.time(),
            parts=tuple(parts),
            sinks=tuple(tokens),
            steps=steps_of(plan),
            frontiers=frontiers,
        )
        self.store.commit(manifest)
        self.committed = True
        return tokens


@contextmanager
def first_snapshot(url: str, job: str, why: str) -> Iterator[FirstSnapshot]:
    """Lock the directory while its first snapshot is made; raise `BatchError` if it has snapshots already."""
    url = absolute(url)
    store = SnapshotStore(url, job)
    store.acquire()
    try:
        newest = next(iter(store.manifests()), None)
        if newest is not None:
            raise BatchError(
                f"{store.where()} has snapshots of {job!r} already, the latest of them {newest.snapshot}: the flow "
                "would not go on from them any more. Name another directory, or delete this one if it is not needed"
            )
        run = store.next_run()
        store.begun(run.snapshot, True, why)
        snapshot = FirstSnapshot(
            store, Save(url, job, run.snapshot, run.generation, store.identity()), time.time()
        )
        try:
            yield snapshot
        except BaseException as error:
            if not snapshot.committed:
                store.failed(run.snapshot, f"{type(error).__name__}: {error}"[:2000])
            raise
    finally:
        store.release()


@contextmanager
def task_errors() -> Iterator[None]:
    """Raise errors of tasks as `BatchError`, without the text that Spark puts around them."""
    try:
        yield
    except PySparkException as error:
        raise BatchError(of_task(str(error))) from error


@dataclass(slots=True)
class HandOver:
    """The snapshot in which a batch run ends, with what it needs of the run."""

    flow: Flow
    plan: Plan
    inputs: Mapping[str, Input]
    into: Collection[str]
    snapshot: FirstSnapshot
    hang_after_s: float = HANG_AFTER_S

    @staticmethod
    @contextmanager
    def begin(
        flow: Flow,
        plan: Plan,
        inputs: Mapping[str, Input],
        url: str,
        job: str,
        into: Collection[str],
        hang_after_s: float = HANG_AFTER_S,
    ) -> Iterator[HandOver]:
        """Begin a snapshot; raise `BatchError` if it is not known where a source goes on."""
        for name, source_input in inputs.items():
            _check_positions(flow, name, source_input)
        with first_snapshot(url, job, "batch run") as snapshot:
            handover = HandOver(flow, plan, inputs, into, snapshot, hang_after_s)
            handover._clear_sinks()
            yield handover

    @property
    def save(self) -> Save:
        """Return the snapshot's number, generation and place."""
        return self.snapshot.save

    def _clear_sinks(self) -> None:
        """Throw away what earlier attempts left in the sinks."""
        for name, sink in self.plan.sinks.items():
            if name in self.into and isinstance(sink, TwoPhaseSink):
                save = self.save
                place = Place(self.plan.flow, name, 0, save.generation, transactional=True)
                self._clear(sink, name, replace(place, store=save.store))

    def _clear(self, sink: TwoPhaseSink[Any], step: str, place: Place) -> None:
        def work() -> None:
            with TokenCall(step, sink, "recover", []):
                check_done(sink.recover_at(place, []))

        watched(work, self.hang_after_s)

    def commit(self, reports: Sequence[dict[str, Any]]) -> None:
        """Commit the snapshot from the reports of all tasks, then the output of the sinks."""
        reached: dict[str, int] = {}
        for report in reports:
            for source, at in report.get("reached", {}).items():
                reached[source] = max(at, reached.get(source, at))
        positions = [
            self._save_positions(name, source_input.positions, reached.get(name, MIN))
            for name, source_input in self.inputs.items()
            if source_input.positions
        ]
        self._publish(self.snapshot.commit(self.plan, reports, positions))

    def _publish(self, parts: Sequence[SinkPart]) -> None:
        """Commit what each sink has prepared for the snapshot; after an error, skip the rest of that sink only."""
        errors: list[BaseException] = []
        for step, sink in self.plan.sinks.items():
            tokens = [part.token for part in parts if part.step == step]
            if not tokens:
                continue
            assert isinstance(sink, TwoPhaseSink)
            try:
                for call in commit_calls(step, sink, tokens):
                    watched(call, self.hang_after_s)
            except BaseException as error:
                pass_interrupt(error)
                errors.append(error)
        if errors:
            raise BatchError(
                f"snapshot {self.save.snapshot} is saved, but not all output is visible yet: "
                f"{'; '.join(map(str, errors))}\nThe flow makes it visible when it goes on from the snapshot"
            ) from errors[0]

    def _save_positions(self, name: str, positions: Mapping[Hashable, Any], reached: int) -> Part:
        states = [
            (None, True, reached) if isinstance(at, Done) else (at, False, reached)
            for at in positions.values()
        ]
        stage = self.plan.sources[name].name
        return write_state(
            self.snapshot.store, self.save, stage, name, 1, 0, list(positions), states
        )


def write_state(
    store: SnapshotStore,
    save: Save,
    stage: str,
    step: str,
    version: int,
    worker: int,
    keys: list[Any],
    states: list[Any],
) -> Part:
    """Write the state of keys as a part of a snapshot."""
    from railgun.engine.snapshots.table import TableWriter

    table = TableWriter(step, version)
    table.add(hash_keys(keys), keys, states, None, None, None)
    where = save.snapshot, save.generation, stage, step
    return store.write_part(*where, worker, table.finish(), table.rows)


def _check_positions(flow: Flow, name: str, source_input: Input) -> None:
    """Raise `BatchError` if it is not known where a source goes on."""
    if source_input.own:
        return
    source = flow.steps[name].options["source"]
    if source_input.positions is None and not is_empty(source):
        raise BatchError(
            f"source {name!r} needs positions from which it goes on when the flow goes on live: pass them with its "
            f"input, as Input(df, positions={_example(source)}); positions={{}} if it begins at its start because the "
            'DataFrame has nothing of it; or pass "source" as its input, and it is read itself'
        )
    if isinstance(source, Streams):
        for part in source_input.positions or ():
            if not any(fnmatchcase(str(part), pattern) for pattern in source.names):
                raise BatchError(
                    f"positions of source {name!r} name {part!r}, which it does not read: it reads "
                    f"{', '.join(map(repr, source.names))}"
                )
    if isinstance(source, Directory):
        directory = os.path.realpath(source.path)
        files = [unquote(urlsplit(file).path) for file in source_input.frame.inputFiles()]
        files = [os.path.relpath(os.path.realpath(file), directory) for file in files]
        own_files = [file for file in files if not file.startswith("..")]
        repeated = [file for file in own_files if file not in (source_input.positions or {})]
        if repeated:
            raise BatchError(
                f"the input of source {name!r} reads {repeated[0]!r} of the same directory as the source, which would "
                'read it again: pass "source" as its input, or say in positions how far each file was read '
                "(DONE: to its end)"
            )


def _example(source: Any) -> str:
    names = getattr(source, "names", None)
    return f"{{{names[0]!r}: 12345}}" if names else "{'a part': its position}"
