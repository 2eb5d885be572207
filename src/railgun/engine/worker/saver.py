"""Do a worker's part in snapshots: save its keys and what its sinks prepared, while records flow.

A snapshot reaches a worker's stages one after the other. At each stage's cut its operators set aside what is to be
saved, and its sinks prepare their output; both happen at once. Keys are encoded in pieces (`step`), between which
records flow. When all stages have been cut, another thread writes the tables, and the controller is told.

What sinks prepared is published when the snapshot is committed. Until that is done it is reported with every further
snapshot, so none of it is lost if this worker is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from railgun.engine.operators.calls import TokenCall
from railgun.engine.operators.committing import commit_calls
from railgun.engine.operators.functions import check_done
from railgun.engine.operators.receiving import Receiving
from railgun.engine.protocol.frontier import MIN
from railgun.engine.protocol.lifecycle import messages as orders
from railgun.engine.snapshots.manifest import Part, SinkPart
from railgun.engine.snapshots.store import SnapshotStore
from railgun.errors import RailgunError, pass_interrupt
from railgun.flows.sink import TwoPhaseSink
from railgun.hashing import hash_keys
from railgun.transport.columns import EncodingError

if TYPE_CHECKING:
    from railgun.engine.operators.changes import Changes
    from railgun.engine.snapshots.table import TableWriter
    from railgun.engine.worker.runtime import Runtime
    from railgun.engine.worker.stage import StageRunner

Work = Callable[[], Any]
Then = Callable[[Any, Exception | None], None]


@dataclass(slots=True)
class _Save:
    """The snapshot under way."""

    snapshot: int
    full: bool
    began: int
    cuts: int = 0
    tables: list[tuple[str, TableWriter, Changes]] = field(default_factory=list)
    sinks: list[tuple[str, Callable[[], Any]]] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds: until the last cut, within cuts, until everything is encoded, and until it is written."""
    since: int = 0  # when the present phase began
    trouble: str = ""
    writing: bool = False
    streams: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    frontiers: list[tuple[str, int]] = field(default_factory=list)
    reached: list[tuple[str, dict[str, int]]] = field(default_factory=list)


class Saver:
    """Does this worker's part of snapshots; without a store it does nothing."""

    def __init__(self, runtime: Runtime, store: SnapshotStore | None) -> None:
        self.runtime = runtime
        self.store = store
        self._save: _Save | None = None
        self._last = 0  # the number of the last snapshot that began here
        self._prepared: list[SinkPart] = []  # and not yet published, as far as is known
        self._reported: tuple[SinkPart, ...] = ()  # reported with the last snapshot
        self.new_table: type[TableWriter]

    def watch(self) -> None:
        """Track which keys change, from now on."""
        if self.store is None:
            return
        from railgun.engine.snapshots.table import TableWriter  # imports Arrow, which takes long

        self.new_table = TableWriter
        for runner in self.runtime.stages:
            for operator in runner.operators.keyed:
                operator.watch_changes()

    def follow(self, snapshot: int) -> None:
        """Note that a snapshot is over or does not concern this worker, whose state is part of later ones."""
        self._last = max(self._last, snapshot)

    # ------------------------------------------------------------ a snapshot

    def take(self, snapshot: int, full: bool) -> None:
        """Begin a snapshot: send its barrier after the records that the sources have sent."""
        now = self.runtime.environment.clock()
        self._save = _Save(snapshot, full, now)
        self._last = snapshot
        for runner in self.runtime.sources:
            runner.barrier(-1, snapshot)

    def cut(self, runner: StageRunner) -> None:
        """Set aside the state of a stage that the snapshot has reached."""
        save = self._save
        assert save is not None
        clock = self.runtime.environment.clock
        began = clock()
        for operator in runner.operators.keyed:
            assert operator.changes is not None
            table = self.new_table(operator.step, operator.setting.version)
            operator.changes.cut(table, save.full)
            if operator.reached(anywhere=True) > MIN:
                save.frontiers.append((operator.step, operator.reached(anywhere=True)))
            save.tables.append((runner.stage.name, table, operator.changes))
        if isinstance(runner.operators.reading, Receiving):
            receiving = runner.operators.reading
            save.streams.append((receiving.step, receiving.table.begin(save.snapshot)))
            save.reached.append((receiving.step, receiving.times_reached()))
        for writing in runner.operators.writing:
            save.sinks.append((writing.step, writing.cut(save.snapshot)))
            self.runtime.environment.mark(runner.stage.index, writing.step, save.snapshot)
        now = clock()
        save.cuts += 1
        save.phases["align"] = (began - save.began) / 1e6
        save.phases["cut"] = save.phases.get("cut", 0.0) + (now - began) / 1e6
        save.since = now

    @property
    def busy(self) -> bool:
        """Return whether `step` has work to do."""
        save = self._save
        if save is None or save.writing:
            return False
        waiting = any(changes.saving for _, _, changes in save.tables)
        return waiting or save.cuts == len(self.runtime.stages)

    def step(self) -> None:
        """Save a block of keys; when all are saved, write them."""
        save = self._save
        assert save is not None
        for _, table, changes in save.tables:
            if changes.saving:
                try:
                    changes.step()
                except EncodingError:
                    raise  # the state could never be moved or saved, so the flow fails
                except RailgunError as error:
                    changes.give_up()
                    save.trouble = save.trouble or f"step {table.step!r}: {error}"
                return
        save.writing = True
        now = self.runtime.environment.clock()
        save.phases["encode"] = (now - save.since) / 1e6
        save.since = now
        self.runtime.environment.background(
            partial(self._write, save), partial(self._written, save)
        )

    def _write(self, save: _Save) -> tuple[list[SinkPart], list[Part], str]:
        """In another thread: return what sinks prepared, the files, and why the snapshot failed, if it did."""
        tokens = prepared(save.sinks)
        try:
            tables = [(stage, table) for stage, table, _ in save.tables if table.rows]
            return tokens, [self._write_table(save.snapshot, *table) for table in tables], ""
        except BaseException as error:
            pass_interrupt(error)
            return tokens, [], str(error) or repr(error)

    def _write_table(self, snapshot: int, stage: str, table: TableWriter) -> Part:
        assert self.store is not None
        runtime = self.runtime
        where = snapshot, runtime.generation, stage, table.step, runtime.worker
        return self.store.write_part(*where, table.finish(), table.rows)

    def _written(self, save: _Save, written: Any, error: Exception | None) -> None:
        if error is not None:
            raise error  # of a sink, whose items are lost
        tokens, parts, trouble = written
        self._prepared += tokens
        if self._save is not save:
            return
        save.phases["write"] = (self.runtime.environment.clock() - save.since) / 1e6
        self._reported = tuple(self._prepared)
        self.runtime.environment.tell(
            orders.Saved(
                self.runtime.generation,
                save.snapshot,
                tuple(parts),
                self._reported,
                sum(table.rows for _, table, _ in save.tables),
                self.runtime.keys,
                tuple(save.phases.items()),
                save.trouble or trouble,
                tuple(save.streams),
                tuple(save.frontiers),
                tuple(save.reached),
            )
        )

    # ------------------------------------------------------------ after the commit

    def settle(self, order: orders.Settled) -> None:
        """End the snapshot: if it is committed, publish what was prepared for it."""
        self._save = None
        for runner in self.runtime.stages:
            for operator in runner.operators.keyed:
                if operator.changes is not None:
                    operator.changes.give_up()
                    operator.changes.settle(order.committed)
        for receiving in self.runtime.receiving():
            receiving.settled(order.snapshot, order.committed)
        if not order.committed:
            return
        self._share(order.tokens)
        tokens = list(self._prepared)

        def published(_: object, error: Exception | None) -> None:
            if error is not None:
                raise error
            self._prepared = [token for token in self._prepared if token not in tokens]
            report = orders.Published(self.runtime.generation, order.snapshot)
            self.runtime.environment.tell(report)

        self.runtime.environment.background(partial(self._publish, tokens), published)

    def _share(self, received: tuple[SinkPart, ...]) -> None:
        """Leave the output of sinks that commit together to one worker, which has `received` that of all workers."""
        sinks = self._sinks()
        together = [step for step, sink in sinks.items() if sink.commits_together]
        self._prepared = [
            part
            for part in self._prepared
            if part.step not in together or part not in self._reported
        ]
        self._prepared += received

    def _publish(self, parts: list[SinkPart]) -> None:
        """Commit in another thread. An error of one sink is raised after all others have committed."""

        def commit(sink: TwoPhaseSink[Any], step: str) -> None:
            for call in commit_calls(
                step, sink, [part.token for part in parts if part.step == step]
            ):
                call()

        self._in_each_sink(commit)

    def recover(self, tokens: list[SinkPart]) -> None:
        """Publish again what belongs to the loaded snapshot, and discard other output of older generations."""

        def recover(sink: TwoPhaseSink[Any], step: str) -> None:
            own_tokens = [token.token for token in tokens if token.step == step]
            with TokenCall(step, sink, "recover", own_tokens):
                check_done(sink.recover_at(self.runtime.place_of(step), own_tokens))

        self._in_each_sink(recover)

    def _in_each_sink(self, work: Callable[[TwoPhaseSink[Any], str], None]) -> None:
        """Call `work` with each sink and its step. An error of one sink is raised after all others were called."""
        first: BaseException | None = None
        for step, sink in self._sinks().items():
            try:
                work(sink, step)
            except BaseException as error:
                pass_interrupt(error)
                first = first or error
        if first is not None:
            raise first

    def _sinks(self) -> dict[str, TwoPhaseSink[Any]]:
        return {
            writing.step: writing.sink
            for runner in self.runtime.stages
            for writing in runner.operators.writing
            if isinstance(writing.sink, TwoPhaseSink)
        }

    # ------------------------------------------------------------ leaving

    def hand_over(self, then: Callable[[], None]) -> None:
        """Prepare this worker's leaving: report what the next snapshot has to save of it, then call `then`."""
        tables, sinks = [], []
        snapshot = self._last + 1
        streams = tuple(
            (receiving.step, receiving.table.positions()) for receiving in self.runtime.receiving()
        )
        reached = tuple(
            (receiving.step, receiving.times_reached()) for receiving in self.runtime.receiving()
        )
        for runner in self.runtime.stages:
            for operator in runner.operators.keyed:
                deleted_keys = [] if operator.changes is None else operator.changes.deleted()
                if deleted_keys:
                    table = self.new_table(operator.step, operator.setting.version)
                    none, deleted = [None] * len(deleted_keys), [True] * len(deleted_keys)
                    table.add(hash_keys(deleted_keys), deleted_keys, none, None, None, deleted)
                    tables.append((runner.stage.name, table))
            for writing in runner.operators.writing:
                sinks.append((writing.step, writing.cut(snapshot)))

        def write() -> tuple[list[SinkPart], list[Part]]:
            parts = [self._write_table(snapshot, stage, table) for stage, table in tables]
            return prepared(sinks), parts

        def written(result: Any, error: Exception | None) -> None:
            tokens, parts = result or ([], [])
            self._prepared += tokens
            trouble = "" if error is None else str(error) or repr(error)
            report = orders.Farewell(
                *(self.runtime.generation, tuple(parts), tuple(self._prepared), trouble),
                streams=streams,
                reached=reached,
            )
            self.runtime.environment.tell(report)
            then()

        self.runtime.environment.background(write, written)


def prepared(sinks: list[tuple[str, Callable[[], Any]]]) -> list[SinkPart]:
    """Let sinks make their output safe, and return the tokens to keep."""
    tokens = [(step, rest()) for step, rest in sinks]
    return [SinkPart(step, token) for step, token in tokens if token is not None]
