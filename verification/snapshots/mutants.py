"""Mutants of saving and loading: production code with one rule broken. The simulation must notice each.

Each is a function that returns the attributes to replace; its docstring states the broken rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final

from railgun.engine.controller.collected import Collected
from railgun.engine.controller.storekeeper import Storekeeper
from railgun.engine.operators.changes import Changes
from railgun.engine.operators.keyed import Keyed
from railgun.engine.operators.stateful import StatefulSteps
from railgun.engine.operators.writing import Writing
from railgun.engine.protocol.frontier import MIN
from railgun.engine.protocol.lifecycle.machine import Lifecycle
from railgun.engine.protocol.lifecycle.messages import Farewell, Settled
from railgun.engine.protocol.lifecycle.snapshots import Snapshots
from railgun.engine.protocol.placement import Placement
from railgun.engine.protocol.rescale.coordinator import Coordinator
from railgun.engine.protocol.stage_alignment import Alignment
from railgun.engine.snapshots.manifest import Manifest, Part, checksum
from railgun.engine.snapshots.store import Cleaned, SnapshotStore
from railgun.engine.worker import loading
from railgun.engine.worker.loading import by_snapshot, read_mine, take_out
from railgun.engine.worker.runtime import Runtime
from railgun.engine.worker.saver import Saver
from railgun.flows.sink import Token, TwoPhaseSink
from railgun.testing.disks import Step
from verification.mutation import Verdict, hunt_seeds, registrar
from verification.snapshots.crashes import Change, Outcome, simulate
from verification.snapshots.external_systems import Drawer

SEEDS: Final = 600  # enough to notice each mutant


@dataclass(frozen=True, slots=True)
class Mutant:
    """The attributes to replace, and the steps of writes to leave out."""

    changes: Sequence[Change]
    without: Sequence[Step] = ()
    hint: int = 0
    """A seed that notices the mutant."""

    def simulate(self, seed: int) -> Outcome:
        """Simulate one job with the mutant."""
        return simulate(seed, self.changes, self.without)


MUTANTS: dict[str, Mutant] = {}
"""The mutants, by name: the first line of the docstring."""

Make = Callable[[], list[Change]]


def mutant(hint: int = 0) -> Callable[[Make], Make]:
    """Register a mutant under the first line of its docstring; the seed `hint` notices the mutant."""
    return registrar(MUTANTS, lambda make: Mutant(make(), hint=hint))


def hunt(name: str, seeds: int = SEEDS) -> Verdict:
    """Simulate jobs with the mutant called `name`: the seed of its hint first, then up to `seeds` others."""
    order = (MUTANTS[name].hint, *range(seeds))
    return hunt_seeds(name, order, MUTANTS[name].simulate, label="crashes, seed")


# ---------------------------------------------------------------- the disk

MUTANTS["A file gets its name before its content is synced"] = Mutant((), ("sync",))
MUTANTS["The directory of a file is not synced"] = Mutant((), ("sync directory",))


# ---------------------------------------------------------------- the commit


@mutant()
def manifest_before_parts() -> list[Change]:
    """The manifest is written before the parts it names."""
    late: dict[int, list[tuple[str, bytes]]] = {}

    def write_part(
        self: SnapshotStore, snapshot: int, generation: int, stage: str, step: str, worker: int,
        data: bytes, rows: int,
    ) -> Part:  # fmt: skip
        path = f"data/{snapshot:012d}/{len(late.get(id(self), ()))}/{step}-{worker}-g{generation}"
        late.setdefault(id(self), []).append((path, data))
        return Part(path, snapshot, stage, step, worker, rows, len(data), checksum(data))

    def commit(self: SnapshotStore, manifest: Manifest) -> None:
        self.disk.write(self._at(f"manifests/{manifest.snapshot:012d}.json"), manifest.to_json())
        for path, data in late.pop(id(self), ()):
            self.disk.write(self._at(path), data)
        self._pinned = None

    return [(SnapshotStore, "write_part", write_part), (SnapshotStore, "commit", commit)]


@mutant()
def settled_before_the_manifest() -> list[Change]:
    """Workers hear that a snapshot is committed before its manifest is written."""
    advance = Snapshots._advance_snapshot

    def too_soon(self: Snapshots, now: int) -> bool:
        before, went = self.saving.phase, advance(self, now)
        if before != "writing" == self.saving.phase:
            self._settle(self.saving.number, committed=True)
        return went

    return [(Snapshots, "_advance_snapshot", too_soon)]


@mutant()
def sink_commits_before_the_manifest() -> list[Change]:
    """Sinks publish prepared output at once."""
    cut = Writing.cut

    def shows(self: Writing, snapshot: int) -> Callable[[], Token | None]:
        token = cut(self, snapshot)()
        if token is not None and isinstance(self.sink, TwoPhaseSink):
            self.sink.commit(token)
        return lambda: token

    return [(Writing, "cut", shows)]


@mutant(hint=132)
def generation_does_not_wait() -> list[Change]:
    """A generation begins before it is known whether the last manifest counts."""
    begin = Lifecycle._begin_generation

    def begins(self: Lifecycle, now: int) -> bool:
        phase = self.saving.phase
        if phase == "writing":
            self.saving.phase = "none"
        went = begin(self, now)
        self.saving.phase = phase
        return went

    return [(Lifecycle, "_begin_generation", begins)]


@mutant(hint=49)
def end_is_not_published() -> list[Change]:
    """The output prepared for the end of a flow is left to a driver that died."""
    return [(Storekeeper, "_publish", lambda self, finished: "")]


# ---------------------------------------------------------------- what is saved


@mutant()
def changes_do_not_move() -> list[Change]:
    """A key that moves loses the mark that it has changed."""

    def leave(self: Changes, keys: Sequence[Any]) -> list[Any]:
        self.preserve(keys)
        self.changed.difference_update(keys)
        self.in_flight.difference_update(keys)
        return []

    return [(Changes, "leave", leave)]


def _saving(other: Callable[[Changes, list[Any]], list[Any]]) -> list[Change]:
    """Return changes that save other keys than the right ones."""
    save = Changes._save

    def saves(self: Changes, keys: list[Any]) -> None:
        chosen = other(self, keys)
        if chosen:
            save(self, chosen)

    return [(Changes, "_save", saves)]


@mutant()
def deleted_keys_forgotten() -> list[Change]:
    """The deletion of a key is not saved."""
    return _saving(lambda self, keys: [key for key in keys if key in self.operator.states])


@mutant(hint=16)
def leaving_without_parts() -> list[Change]:
    """A worker that leaves does not hand over its deleted keys."""
    return [(Changes, "deleted", lambda self: [])]


@mutant()
def leaving_without_tokens() -> list[Change]:
    """The output of a worker that leaves is forgotten."""
    farewell = Storekeeper.farewell

    def forgets(self: Storekeeper, report: Farewell) -> None:
        farewell(self, replace(report, tokens=()))

    return [(Storekeeper, "farewell", forgets)]


@mutant(hint=68)
def leaving_at_once() -> list[Change]:
    """A worker that leaves after the cut adds its later changes to the manifest that is not written yet."""
    return [(Coordinator, "_departure_must_wait", lambda self: False)]


@mutant(hint=96)
def aborted_keys_forgotten() -> list[Change]:
    """The changes of a failed snapshot are not saved again."""

    def settle(self: Changes, committed: bool) -> None:
        self.in_flight = set()

    return [(Changes, "settle", settle)]


@mutant(hint=96)
def aborted_output_forgotten() -> list[Change]:
    """The output prepared for a failed snapshot is not in the next one."""
    settle = Saver.settle

    def settles(self: Saver, order: Settled) -> None:
        if not order.committed:
            self._prepared = []
        settle(self, order)

    return [(Saver, "settle", settles)]


@mutant()
def not_preserved() -> list[Change]:
    """A key that changes while it waits to be saved is saved with the later state."""

    def touch(self: Changes, keys: Sequence[Any], records: Sequence[Any] = ()) -> None:
        self.changed.update(keys)

    return [(Changes, "touch", touch)]


@mutant()
def not_preserved_when_it_leaves() -> list[Change]:
    """A key that leaves while it waits to be saved is not saved."""
    leave = Changes.leave

    def leaves(self: Changes, keys: Sequence[Any]) -> list[Any]:
        table, self._table = self._table, None
        changed = leave(self, keys)
        self._table = table
        return changed

    return [(Changes, "leave", leaves)]


@mutant(hint=429)
def saved_where_it_comes() -> list[Change]:
    """A key that arrives while a snapshot is saved is saved by its new worker too."""
    take = Keyed.take

    def takes(self: Keyed, data: memoryview) -> list[Any]:
        changes = self.changes
        assert changes is not None
        table, changes._table = changes._table, None
        keys = take(self, data)
        changes._table = table
        return keys

    return [(Keyed, "take", takes)]


@mutant(hint=14165)
def touched_is_saved() -> list[Change]:
    """An incremental snapshot saves every key that is touched.

    That does more than add rows: a key that did not change, and comes from a worker that has saved all its keys, is
    saved as deleted by this worker and as alive by none.
    """
    preserve, step = Changes.preserve, Changes.step

    def preserves(self: Changes, keys: Collection[Any]) -> None:
        if self._table is None or self._full:
            preserve(self, keys)
            return
        fresh = set(keys).difference(self._done)
        self._done |= fresh
        self._left -= fresh
        if fresh:
            self._save(list(fresh))

    def steps(self: Changes) -> None:
        left = self._left.copy()
        step(self)
        if not self._full:
            self._done |= left - self._left

    return [(Changes, "preserve", preserves), (Changes, "step", steps)]


class _Lossy:
    """A table that leaves out a column."""

    def __init__(self, table: Any, column: int) -> None:
        self.table, self.column = table, column

    def add(self, *columns: Any) -> None:
        self.table.add(*(None if n == self.column else c for n, c in enumerate(columns)))


def _without(column: int) -> list[Change]:
    save = Changes._save

    def saves(self: Changes, keys: list[Any]) -> None:
        table = self._table
        self._table = _Lossy(table, column)  # type: ignore[assignment]
        save(self, keys)
        self._table = table

    return [(Changes, "_save", saves)]


@mutant()
def timers_not_saved() -> list[Change]:
    """Timers are not saved."""
    return _without(3)


@mutant()
def ends_not_saved() -> list[Change]:
    """The end of a key is not saved."""
    return _without(4)


@mutant()
def barrier_not_aligned() -> list[Change]:
    """Records that one stage sends behind the barrier do not wait for the barriers of the other stages."""
    return [(Alignment, "waits", lambda self, origin: False)]


# ---------------------------------------------------------------- what is loaded


@mutant(hint=290)
def deleted_wins() -> list[Change]:
    """A row that deletes a key wins over a row with its state in the same snapshot."""

    def load(
        runtime: Runtime,
        store: SnapshotStore,
        parts: Sequence[Part],
        placement: Placement,
    ) -> None:
        for group in by_snapshot(parts):
            read = [(p.step, read_mine(runtime, store, p, placement)) for p in group]
            for step, rows in read:
                runtime.load(step, take_out(runtime, step, rows))
            for step, rows in read:
                take_out(runtime, step, rows)
        runtime.loaded()

    return [(loading, "load_at_once", load)]


@mutant()
def wrong_order() -> list[Change]:
    """The newest parts are loaded first."""

    def backwards(parts: Sequence[Part]) -> Iterator[list[Part]]:
        newest_first = sorted(parts, key=attrgetter("snapshot"), reverse=True)
        return ([part] for part in newest_first)

    return [(loading, "by_snapshot", backwards)]


@mutant()
def recovers_without_tokens() -> list[Change]:
    """A generation begins without publishing the output of its snapshot."""
    recover = Saver.recover
    return [(Saver, "recover", lambda self, tokens: recover(self, []))]


@mutant()
def recovery_discards_first() -> list[Change]:
    """A sink that recovers deletes output that was committed and not yet published."""

    def recover(
        self: Drawer, flow: str, step: str, generation: int, tokens: Sequence[Token]
    ) -> None:
        for name in self.disk.list("staged"):
            if int(name.partition("/")[0]) < generation:
                self.disk.delete(f"staged/{name}")

    return [(Drawer, "recover", recover)]


@mutant()
def nothing_discarded() -> list[Change]:
    """`Collect` keeps output from after the snapshot to which the flow goes back."""
    return [(Collected, "go_back", lambda self, snapshot: None)]


# ---------------------------------------------------------------- time


@mutant(hint=83)
def time_begins_anew() -> list[Change]:
    """A generation begins without the frontiers of its snapshot."""
    return [(Runtime, "restore", lambda self, frontiers: None)]


@mutant(hint=83)
def frontiers_not_saved() -> list[Change]:
    """Workers do not report their frontiers at their cuts."""
    return [(StatefulSteps, "reached", lambda self, anywhere=False: MIN)]


@mutant()
def timers_see_less() -> list[Change]:
    """A timer that fires as its key moves, or at the end, sees a frontier below its time."""

    def never(self: StatefulSteps, call: Any, function: Any, calls: Any, soon: Any) -> None:
        frontier = self.context.frontier

        def told(context: Any) -> Any:
            context.frontier = frontier
            return function(context)

        call_all(self, call, told, calls, soon)

    call_all = StatefulSteps._call_all
    return [(StatefulSteps, "_call_all", never)]


# ---------------------------------------------------------------- numbers and retention


@mutant()
def generation_not_kept() -> list[Change]:
    """The numbers of used generations are not stored."""
    write = SnapshotStore._write_counters

    def forgets(self: SnapshotStore, generation: int, snapshot: int) -> None:
        write(self, 0, snapshot)

    return [(SnapshotStore, "_write_counters", forgets)]


@mutant()
def snapshot_not_kept() -> list[Change]:
    """The number of a snapshot that begins is not stored."""
    return [(SnapshotStore, "begun", lambda self, snapshot, full, why: None)]


@mutant()
def increments_lose_their_base() -> list[Change]:
    """Retention drops parts that the newest snapshot builds upon."""
    clean = SnapshotStore.clean

    def drops(self: SnapshotStore, keep: int = 3) -> Cleaned:
        newest = max(self._ids("manifests"))
        for name in self.disk.list(self._at("data")):
            if int(name.partition("/")[0]) < newest:
                self.disk.delete(self._at(f"data/{name}"))
        return clean(self, keep)

    return [(SnapshotStore, "clean", drops)]
