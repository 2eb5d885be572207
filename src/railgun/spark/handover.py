"""Handing over: a batch run ends in a snapshot, and the flow goes on from it, live.

Rules:

1. A directory that has snapshots of the flow is refused: the flow would go on from the new one, and all it did since
   the others would be lost.
2. Tasks write the state of their keys, and tell which files they wrote; what a task wrote that failed, or that was run
   twice, nobody names. The manifest is written last, when all tasks are done: then the snapshot is there.
3. Every source must know where it goes on. Of one that was read itself the tasks save the positions. Of one that a
   DataFrame stood for, whoever runs the batch says them; nobody else can know.
4. What sinks got is prepared by the tasks, named in the manifest, and committed after it. Should this process die in
   between, the live flow commits it when it begins, as it does after any failure.
5. What sinks do in this process (`recover` before the run, `commit` after it) is watched as on workers. A call that
   does not return for `hang_after_s` ends the run with an error that names step, method, token and stack. Other sinks
   have their turn all the same.
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
"""Seconds after which a call of a sink is taken for a hang, as `Settings.hang_after`."""


@dataclass(slots=True)
class Making:
    """A first snapshot that is being made in a directory."""

    store: SnapshotStore
    save: Save
    began: float
    committed: bool = False

    def commit(
        self, plan: Plan, told: Sequence[dict[str, Any]], further: Sequence[Part] = ()
    ) -> list[SinkPart]:
        """All is written, and tasks have told this: make the snapshot count. What sinks have prepared for it."""
        parts = [*(Part(**word["part"]) for word in told if "part" in word), *further]
        tokens = [SinkPart(word["sink"], word["token"]) for word in told if "token" in word]
        frontiers: dict[str, int] = {}
        for word in told:
            if "frontier" in word:
                step, at = word["frontier"], word["at"]
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
def making(url: str, job: str, why: str) -> Iterator[Making]:
    """Be the only one who works in the directory, for as long as it takes to make its first snapshot."""
    url = absolute(url)
    store = SnapshotStore(url, job)
    store.acquire()
    try:
        newest = next(iter(store.manifests()), None)
        if newest is not None:
            raise BatchError(
                f"{store.where()} has snapshots of {job!r} already, the latest of them {newest.snapshot}: a run would "
                "not go on from there any more. Name another directory, or delete this one if it is not wanted"
            )
        run = store.next_run()
        store.begun(run.snapshot, True, why)
        made = Making(
            store, Save(url, job, run.snapshot, run.generation, store.identity()), time.time()
        )
        try:
            yield made
        except BaseException as error:
            if not made.committed:
                store.failed(run.snapshot, f"{type(error).__name__}: {error}"[:2000])
            raise
    finally:
        store.release()


@contextmanager
def told_by_tasks() -> Iterator[None]:
    """What tasks raise, without what Spark puts around it."""
    try:
        yield
    except PySparkException as error:
        raise BatchError(of_task(str(error))) from error


@dataclass(slots=True)
class HandOver:
    """The snapshot that a batch run ends in."""

    flow: Flow
    plan: Plan
    inputs: Mapping[str, Input]
    into: Collection[str]
    made: Making
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
        """Begin a snapshot, if every source knows where it will go on."""
        for name, given in inputs.items():
            _check_positions(flow, name, given)
        with making(url, job, "batch run") as made:
            handing = HandOver(flow, plan, inputs, into, made, hang_after_s)
            handing._clear_sinks()
            yield handing

    @property
    def save(self) -> Save:
        """Which snapshot it is."""
        return self.made.save

    def _clear_sinks(self) -> None:
        """Throw away what earlier attempts have left in the sinks."""
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

    def commit(self, told: Sequence[dict[str, Any]]) -> None:
        """All tasks are done, and have told this: make the snapshot count, and let others see what sinks got."""
        reached: dict[str, int] = {}
        for word in told:
            for source, at in word.get("reached", {}).items():
                reached[source] = max(at, reached.get(source, at))
        positions = [
            self._save_positions(name, given.positions, reached.get(name, MIN))
            for name, given in self.inputs.items()
            if given.positions
        ]
        self._publish(self.made.commit(self.plan, told, positions))

    def _publish(self, parts: Sequence[SinkPart]) -> None:
        """Let every sink show what was prepared for the snapshot; a step with an error commits nothing after it."""
        wrong: list[BaseException] = []
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
                wrong.append(error)
        if wrong:
            raise BatchError(
                f"snapshot {self.save.snapshot} is saved, but not all output is visible yet: "
                f"{'; '.join(map(str, wrong))}\nThe flow makes it visible when it goes on from the snapshot"
            ) from wrong[0]

    def _save_positions(self, name: str, positions: Mapping[Hashable, Any], reached: int) -> Part:
        states = [
            (None, True, reached) if isinstance(at, Done) else (at, False, reached)
            for at in positions.values()
        ]
        stage = self.plan.sources[name].name
        return write_state(self.made.store, self.save, stage, name, 1, 0, list(positions), states)


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


def _check_positions(flow: Flow, name: str, given: Input) -> None:
    """Refuse a source of which nobody knows where it goes on."""
    if given.own:
        return
    source = flow.steps[name].options["source"]
    if given.positions is None and not is_empty(source):
        raise BatchError(
            f"source {name!r} does not know where it goes on when the flow goes on live: say it with the input, as "
            f"Input(df, positions={_example(source)}); positions={{}} if it begins at its start, which the DataFrame "
            'has nothing of; or give "source" as its input, and it is read itself'
        )
    if isinstance(source, Streams):
        for part in given.positions or ():
            if not any(fnmatchcase(str(part), one) for one in source.names):
                raise BatchError(
                    f"positions of source {name!r} name {part!r}, which it does not read: it reads "
                    f"{', '.join(map(repr, source.names))}"
                )
    if isinstance(source, Directory):
        own = os.path.realpath(source.path)
        read = [unquote(urlsplit(file).path) for file in given.frame.inputFiles()]
        read = [os.path.relpath(os.path.realpath(file), own) for file in read]
        names = [file for file in read if not file.startswith("..")]
        left = [file for file in names if file not in (given.positions or {})]
        if left:
            raise BatchError(
                f"the input of source {name!r} reads {left[0]!r} of the very directory that the source reads, and "
                'would come again: give "source" as its input, or say in positions how far each file was read '
                "(DONE: to its end)"
            )


def _example(source: Any) -> str:
    names = getattr(source, "names", None)
    return f"{{{names[0]!r}: 12345}}" if names else "{'a part': its position}"
