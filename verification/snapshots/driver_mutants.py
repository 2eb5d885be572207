"""Mutants of the drivers around snapshots: loading, changes, saver, storekeeper and store, with one line changed.

Each entry names what goes wrong, the function, the text that is replaced and the text that replaces it. The rest of the
function stays the production code, so a mutant that no longer applies says so (`StaleMutantError`) instead of testing
something old. The jobs that crash (`crashes`) must notice each of them.

These were written too, and change nothing that could be noticed, because another rule stands before them: nobody leaves
while a snapshot is unsettled (what a leaving worker hands over while a manifest is written, or changed before the cut,
and where its files lie); a snapshot fails only when all have answered, and a full one that failed is followed by a full
one; one thread does what a worker does in the background, in order; and whatever is saved or published a second time is
the same as the first. To save keys that did not change is not among them: see `mutants.touched_is_saved`.

One is left to tests/engine/operators/test_frontiers.py: that workers tell a lower time after a load than was restored.
Here they never do, as no part of the source is idle, and time goes on where its readers were at the cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from railgun.engine.controller.storekeeper import Storekeeper
from railgun.engine.operators.changes import Changes
from railgun.engine.operators.keyed import Keyed
from railgun.engine.operators.stateful import StatefulSteps
from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.worker import loading
from railgun.engine.worker.saver import Saver
from verification.mutation import Verdict, hunt_seeds
from verification.rewriting import rewritten
from verification.snapshots.crashes import Change, Outcome, simulate

SEEDS: Final = 600  # enough to notice each mutant


@dataclass(frozen=True)
class Rewrite:
    """One function with some of its text replaced."""

    owner: Any
    name: str
    edits: tuple[tuple[str, str], ...]

    @cached_property
    def changes(self) -> list[Change]:
        """Return the rewritten function, with its owner and name."""
        return [rewritten(self.owner, self.name, *self.edits)]

    def simulate(self, seed: int) -> Outcome:
        """Simulate one job with the rewritten function."""
        return simulate(seed, self.changes)


def hunt(name: str, seeds: int = SEEDS) -> Verdict:
    """Simulate jobs with the mutant called `name`: the seed of `_HINTS` first, then up to `seeds` others."""
    order = (_HINTS.get(name, 0), *range(seeds))
    return hunt_seeds(name, order, MUTANTS[name].simulate, label="crashes, seed")


def _one(owner: Any, name: str, old: str, new: str) -> Rewrite:
    return Rewrite(owner, name, ((old, new),))


_LOADING: Final[Mapping[str, Rewrite]] = {
    "Rows of a file are loaded before the deletions of the next file": _one(
        loading,
        "loading_steps",
        "alive.append((part.step, take_out(runtime, part.step, rows)))",
        "runtime.load(part.step, take_out(runtime, part.step, rows))",
    ),
    "Deleted keys are not removed": _one(
        loading,
        "take_out",
        "runtime.unload(step, list(compress(rows.keys, rows.deleted)))",
        "pass",
    ),
    "All snapshots are loaded as if they were one": _one(
        loading,
        "by_snapshot",
        'groupby(ordered, key=attrgetter("snapshot"))',
        "groupby(ordered, key=lambda part: 0)",
    ),
    "Rows with deletions among them lose their timers": _one(
        loading,
        "take_out",
        "list(compress(rows.timers, alive)), ",
        "[[] for _ in keys], ",
    ),
    "Rows with deletions among them lose the ends of keys": _one(
        loading,
        "take_out",
        "list(compress(rows.ended, alive))\n",
        "[False for _ in keys]\n",
    ),
    "Rows with deletions among them have the states of other keys": _one(
        loading,
        "take_out",
        "list(compress(rows.states, alive))",
        "list(reversed(list(compress(rows.states, alive))))",
    ),
    "A worker loads the keys of other workers": _one(
        loading, "read_mine", "placement.owners(hashes) == runtime.worker", "hashes == hashes"
    ),
    "The last file of a snapshot is not loaded": _one(
        loading,
        "loading_steps",
        "for step, rows in alive:",
        "for step, rows in alive[:-1] or alive:",
    ),
}

_CHANGES: Final[Mapping[str, Rewrite]] = {
    "A key that moves forgets that it is part of an unsettled snapshot": _one(
        Changes,
        "leave",
        "if key in self.changed or key in self.in_flight",
        "if key in self.changed",
    ),
    "A key that moves forgets that it changed after the cut": _one(
        Changes,
        "leave",
        "if key in self.changed or key in self.in_flight",
        "if key in self.in_flight",
    ),
    "A key that moves during a snapshot moves without its changes": _one(
        Changes,
        "leave",
        "if not self.changed and not self.in_flight:",
        "if not self.changed or self.in_flight:",
    ),
    "After a failed snapshot only its keys count as changed, and later changes are forgotten": _one(
        Changes, "settle", "self.changed |= self.in_flight", "self.changed = self.in_flight"
    ),
    "A committed snapshot forgets the changes since its cut": _one(
        Changes, "settle", "self.in_flight = set()", "self.in_flight = self.changed = set()"
    ),
    "The keys of a failed snapshot are saved only if nothing has changed since": _one(
        Changes, "settle", "if not committed:", "if not committed and not self.changed:"
    ),
    "A key that is saved with a full snapshot is saved again when it changes": _one(
        Changes, "preserve", "self._done |= fresh", "pass"
    ),
    "A key that is saved is saved again when it changes": _one(
        Changes, "preserve", "self._left -= fresh", "pass"
    ),
    "The first key of a block is not saved with a full snapshot": _one(
        Changes, "step", "self.preserve(block)", "self.preserve(block[1:])"
    ),
    "The first key of a block is not saved": _one(
        Changes,
        "step",
        "for _ in range(min(BLOCK_KEYS, len(self._left)))]",
        "for _ in range(min(BLOCK_KEYS, len(self._left)))][1:] or []",
    ),
    "Saving of a full snapshot ends one block early": _one(
        Changes, "step", "if block:", "if len(block) == BLOCK_KEYS:"
    ),
    "Saving ends one block early": _one(
        Changes, "step", "elif self._left:", "elif len(self._left) >= BLOCK_KEYS:"
    ),
    "A worker that leaves hands over only deletions before the cut": _one(
        Changes, "deleted", "[*{*self.changed, *self.in_flight}]", "[*self.in_flight]"
    ),
    "A key that is created after the cut of a full snapshot is saved with it": _one(
        Changes,
        "preserve",
        "if fresh:",
        "fresh = {k for k in fresh if k in self.operator.states}\n    if fresh:",
    ),
    "Keys that are created while all keys count as changed are not saved": _one(
        Changes, "cut", "self._note_all()", "self.all_changed = False"
    ),
    "Keys that are created while all keys count as changed move as unchanged": _one(
        Changes, "leave", "self._note_all()", "pass"
    ),
    "A key that arrives while all keys count as changed, and is deleted, is not saved as deleted": _one(
        Changes, "arrive", "self._note_all()", "pass"
    ),
    "Keys that count as changed with all others are not recorded": _one(
        Changes, "_look", "self.changed |= unchanged", "pass"
    ),
    "When there are too many keys for all to count as changed, unrecorded ones are forgotten": _one(
        Changes, "_touch", "self._note_all()", "self.all_changed = False"
    ),
    "Keys that arrive when there are too many for all to count as changed are not recorded": Rewrite(
        Changes,
        "_touch",
        (
            (
                "if count > MAX_ALL_CHANGED_KEYS:",
                "if self.all_changed and count > MAX_ALL_CHANGED_KEYS:",
            ),
            ("if not self.all_changed:", "elif not self.all_changed:"),
        ),
    ),
    "A key that arrives does not count as changed": _one(
        Keyed, "take", "self.touch(changed)", "pass"
    ),
}

_SAVER: Final[Mapping[str, Rewrite]] = {
    "A worker does not hear that a snapshot has failed": _one(
        Saver, "settle", "operator.changes.settle(order.committed)", "operator.changes.settle(True)"
    ),
    "Output of workers that have left is not published": _one(
        Saver, "_share", "self._prepared += received", "pass"
    ),
    "Output that one worker commits for all is given to that worker before the snapshot is safe": _one(
        Saver,
        "settle",
        "if not order.committed:\n        return",
        "if not order.committed:\n        self._share(())\n        return",
    ),
    "Output of a snapshot that failed is not handed over by a worker that leaves": _one(
        Saver,
        "hand_over",
        "tuple(parts), tuple(self._prepared), trouble",
        "tuple(parts), tuple(tokens), trouble",
    ),
    "A worker that leaves does not cut its sinks": _one(
        Saver, "hand_over", "sinks.append((writing.step, writing.cut(snapshot)))", "pass"
    ),
    "A worker writes before all its stages are cut": _one(
        Saver, "busy", "save.cuts == len(self.runtime.stages)", "save.cuts > 0"
    ),
    "A worker that cannot write its files reports success": _one(
        Saver, "_write", "return tokens, [], str(error) or repr(error)", 'return tokens, [], ""'
    ),
    "Every table after the second is left out": _one(
        Saver, "_write", "in save.tables if", "in save.tables[:2] if"
    ),
    "Output that cannot be published is reported as published": _one(
        Saver,
        "settle",
        "if error is not None:\n            raise error\n",
        "if False:\n            pass\n",
    ),
    "A worker reports only the output prepared for this snapshot": _one(
        Saver, "_written", "tuple(self._prepared)", "tuple(tokens)"
    ),
    "Tables are written before all keys are saved": _one(
        Saver, "step", "            return\n    save.writing", "    save.writing"
    ),
}

_STOREKEEPER: Final[Mapping[str, Rewrite]] = {
    "The parts of workers that left are in every further snapshot": _one(
        Storekeeper,
        "written",
        "self._farewells = [f for f in self._farewells if f not in self._in_manifest]",
        "pass",
    ),
    "A full snapshot builds upon the snapshot before": _one(
        Storekeeper,
        "_manifest",
        "if self._full or self.manifest is None",
        "if self.manifest is None",
    ),
    "An incremental snapshot builds upon nothing": _one(
        Storekeeper,
        "_manifest",
        "if self._full or self.manifest is None else self.manifest.parts",
        "",
    ),
    "Snapshots build upon a failed snapshot": _one(
        Storekeeper,
        "write",
        "manifest = self._writing = replace(",
        "manifest = self._writing = self.manifest = replace(",
    ),
    "The parts of workers of an older generation are kept": _one(
        Storekeeper, "new_generation", "self.reports, self._farewells = {}, []", "self.reports = {}"
    ),
    "Reports of a snapshot that failed count for the next": _one(
        Storekeeper, "record", "self.reports = {}\n", "pass\n"
    ),
    "Only one piece of the output of a step is in the manifest": _one(
        Storekeeper, "_manifest", "{repr(t): t for", "{t.step: t for"
    ),
    "Output of workers that have left is reported to no worker": _one(
        Storekeeper,
        "tokens_of_departed",
        "for farewell in self._in_manifest",
        "for farewell in self._farewells",
    ),
    "Output that one worker commits for all is reported to no worker": _one(
        Storekeeper, "tokens_for_one", "if token.step in together]", "if False]"
    ),
    "Generations are used without being stored": _one(
        Storekeeper, "_reserve", "self.store.use_generation(ahead)", "pass"
    ),
    "A generation begins with the first snapshot of the job": _one(
        Storekeeper, "written", "= self._writing,", "= self.manifest or self._writing,"
    ),
}

_STORE: Final[Mapping[str, Rewrite]] = {
    "A manifest whose write raised stays": _one(
        SnapshotStore, "commit", "self._take_back(manifest.snapshot, error)", "pass"
    ),
    "A manifest whose write raised is deleted, but not durably": _one(
        SnapshotStore, "_take_back", 'self.disk.sync(self._at("manifests"))', "pass"
    ),
    "A manifest that cannot be deleted is taken for deleted": _one(
        Storekeeper,
        "write",
        "self._take_back_later(order.snapshot, str(error), then)",
        "then(str(error))",
    ),
    "Retention deletes files before manifests": Rewrite(
        SnapshotStore,
        "clean",
        (
            (
                "    for number in dropped:\n"
                "        self._remember(number)\n"
                "        self.disk.delete(self._at(_manifest_path(number)))\n",
                "",
            ),
            (
                '    for number in self._ids("attempts")[ATTEMPTS_KEPT:]:\n',
                "    for number in dropped:\n"
                "        self.disk.delete(self._at(_manifest_path(number)))\n"
                '    for number in self._ids("attempts")[ATTEMPTS_KEPT:]:\n',
            ),
        ),
    ),
    "Retention keeps one snapshot too few": _one(
        SnapshotStore, "clean", "if len(kept) == keep:", "if len(kept) == max(1, keep - 1):"
    ),
    "Attempts are not searched for used numbers": _one(
        SnapshotStore,
        "_counters",
        'self._ids("attempts") + self._ids("manifests")',
        'self._ids("manifests")',
    ),
    "A loading worker does not make the manifest durable": _one(
        SnapshotStore, "latest", 'self.disk.sync(self._at("manifests"))\n', "pass\n"
    ),
    "A snapshot older than the newest is loaded": _one(
        SnapshotStore,
        "latest",
        'for snapshot in self._ids("manifests"):',
        'for snapshot in self._ids("manifests")[::-1]:',
    ),
}

_TIME: Final[Mapping[str, Rewrite]] = {
    "A snapshot has the frontier of a worker, and not the frontiers of its keys at other workers": _one(
        StatefulSteps,
        "reached",
        "max(self.context.frontier, self._highest) if anywhere",
        "self.context.frontier if anywhere",
    ),
    "A key that moves loses its frontier": _one(
        StatefulSteps, "restore_keys", "if frontier > self.context.frontier:", "if False:"
    ),
    "A record does not see the frontier of its key from before the move": _one(
        StatefulSteps, "_frontiers", "if not self.floors:", "if True:"
    ),
}

MUTANTS: Final[dict[str, Rewrite]] = {
    **_LOADING,
    **_CHANGES,
    **_SAVER,
    **_STOREKEEPER,
    **_STORE,
    **_TIME,
}
"""The mutants, by the fault that each has."""

_HINTS: Final[Mapping[str, int]] = {
    "Rows of a file are loaded before the deletions of the next file": 290,
    "A key that moves forgets that it is part of an unsettled snapshot": 41,
    "A key that moves during a snapshot moves without its changes": 68,
    "The keys of a failed snapshot are saved only if nothing has changed since": 96,
    "A worker that leaves hands over only deletions before the cut": 16,
    "Output of a snapshot that failed is not handed over by a worker that leaves": 280,
    "Output that cannot be published is reported as published": 49,
    "The parts of workers of an older generation are kept": 116,
    "Snapshots build upon a failed snapshot": 245,
    "A manifest whose write raised stays": 116,
    "A manifest that cannot be deleted is taken for deleted": 116,
    "A manifest whose write raised is deleted, but not durably": 774,
    "A worker reports only the output prepared for this snapshot": 151,
    "The parts of workers that left are in every further snapshot": 307,
    "Only one piece of the output of a step is in the manifest": 59,
    "Retention deletes files before manifests": 430,
    "A record does not see the frontier of its key from before the move": 230,
    "Keys that arrive when there are too many for all to count as changed are not recorded": 369,
    "A loading worker does not make the manifest durable": 441,
}
"""Seeds that notice the mutants that few seeds notice."""
