"""Does a snapshot fit a flow? Flows change between runs: steps are renamed, dropped, given another version of state.

Rules:

1. A step of the snapshot goes to the step of the flow that has its name, or the name it is renamed to. Steps that are
   new in the flow begin without state.
2. State is never dropped because nobody asked: a step of the snapshot that has no place in the flow is refused, unless
   it is dropped by name. That holds for sinks with prepared output, too: it would never become visible.
3. What state means is the step's matter: it goes only to a step of the same kind. A newer version of state than the
   flow knows is refused; an older one is brought up by the step's `upgrade(state, from_version)`, called once for each
   version between, and refused if the step has none.
4. A position means something only within the layout of its source (`Source.layout`). A snapshot with another one than
   the source has now is refused: going on from it would leave records out, and bring others twice.
5. Keys of another type than those in the snapshot find none of its state, and parts that a source does not have any
   more cannot be read on. Both can be meant, and are told as a warning, by name (`KeysMade`, `other_parts`).
6. A name that is given and leads nowhere is a slip of the pen, and refused. All that is wrong is told at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Number

from railgun.engine.snapshots.errors import DoesNotFitError
from railgun.engine.snapshots.manifest import Manifest, StepInfo
from railgun.engine.snapshots.option_names import FRESH
from railgun.engine.snapshots.option_names import drop as drop_of
from railgun.engine.snapshots.option_names import rename as rename_as

MADE = 1_000
"""Keys of a step that are compared with those in the snapshot."""


def fit(
    manifest: Manifest,
    steps: Sequence[StepInfo],
    rename: Mapping[str, str],
    drop: Collection[str],
    *,
    flow: str | None = None,
    upgrades: Collection[str] = (),
) -> dict[str, str]:
    """Where the state of each step of a snapshot goes: from names in the manifest to names in the flow.

    `upgrades`: the steps of the flow that can bring up older state. `flow`: the flow's name, if it is to be checked.

    >>> old = Manifest(1, "demo", 7, 1, 2, True, False, 0.0, 1.0, (), (), (StepInfo("total", "reduce", 1),))
    >>> fit(old, [StepInfo("totals", "reduce", 1)], {"total": "totals"}, [])
    {'total': 'totals'}
    >>> fit(old, [StepInfo("totals", "reduce", 1)], {}, [])
    Traceback (most recent call last):
    railgun.engine.snapshots.errors.DoesNotFitError: snapshot 7 of 'demo' does not fit this flow:
    - step 'total' has state in the snapshot, and no place in the flow: rename={'total': NAME}, or drop={'total'}
      (steps of the flow without state in the snapshot: 'totals')
    """
    if flow is not None and manifest.flow != flow:
        raise DoesNotFitError(
            f"snapshot {manifest.snapshot} is of flow {manifest.flow!r}, not of {flow!r}: name the directory of "
            f"snapshots of {flow!r}, or call the flow {manifest.flow!r} if it is the same"
        )
    plan = {step.name: step for step in steps}
    had = {step.name: step for step in manifest.steps}
    sinks = dict.fromkeys(sink.step for sink in manifest.sinks)
    names = [*had, *(name for name in sinks if name not in had)]
    wrong = _slips(names, plan, rename, drop)
    places: dict[str, str] = {}
    homeless: list[str] = []
    for name in names:
        if name in drop:
            continue
        place = rename.get(name, name)
        if place in plan:
            places[name] = place
            if name in had:
                wrong += _misfits(had[name], plan[place], upgrades)
        elif name not in rename:
            homeless.append(name)
    crowded = [place for place, count in Counter(places.values()).items() if count > 1]
    for place in crowded:
        froms = _listed(name for name in places if places[name] == place)
        wrong.append(f"steps {froms} would all go to step {place!r}: rename or drop all but one")
    for name in homeless:
        what = "has state in the snapshot" if name in had else "has prepared output"
        wrong.append(
            f"step {name!r} {what}, and no place in the flow: {rename_as(name, 'NAME')}, or {drop_of(name)}"
        )
    if wrong:
        empty = _listed(name for name in plan if name not in places.values())
        hint = f"\n  (steps of the flow without state in the snapshot: {empty})" if empty else ""
        told = "".join(f"\n- {line}" for line in wrong)
        raise DoesNotFitError(
            f"snapshot {manifest.snapshot} of {manifest.flow!r} does not fit this flow:{told}{hint if homeless else ''}"
        )
    return places


def _slips(
    names: Collection[str],
    plan: Mapping[str, StepInfo],
    rename: Mapping[str, str],
    drop: Collection[str],
) -> list[str]:
    wrong = []
    there = f"it has {_listed(names)}" if names else "it has none"
    for old, new in rename.items():
        if old not in names:
            wrong.append(f"{rename_as(old, new)}: the snapshot has no step {old!r}; {there}")
        if new not in plan:
            known = _listed(plan) or "none"
            wrong.append(
                f"{rename_as(old, new)}: the flow has no step {new!r} with state; it has {known}"
            )
        if old in drop:
            wrong.append(f"step {old!r} cannot be both renamed and dropped")
    wrong += [
        f"{drop_of(name)}: the snapshot has no step {name!r}; {there}"
        for name in drop
        if name not in names
    ]
    return wrong


def _misfits(had: StepInfo, now: StepInfo, upgrades: Collection[str]) -> list[str]:
    where = f"step {had.name!r}" if had.name == now.name else f"step {had.name!r} → {now.name!r}"
    if had.kind != now.kind:
        return [
            f"{where} was a {had.kind} and is a {now.kind}, whose state is another: give the new one another name, "
            f"and {drop_of(had.name)}"
        ]
    if had.version > now.version:
        return [
            f"{where} has state of version {had.version} in the snapshot, and the flow knows up to {now.version}: "
            f"run the newer flow, load an older snapshot, or {drop_of(had.name)}"
        ]
    if had.version < now.version and now.name not in upgrades:
        return [
            f"{where} has state of version {had.version} in the snapshot and {now.version} in the flow, and no "
            f"upgrade(state, from_version): write one, or {drop_of(had.name)}"
        ]
    changes = _layout_changes(had.layout or {}, now.layout or {})
    if changes:
        return [
            f"source {now.name!r} divides its records into parts in another way than in the snapshot, so that the "
            f"saved positions mean something else: {changes}. Make the source as it was; "
            f"or begin afresh ({FRESH()}); or read the source again from its start, with the state of all other "
            f"steps as it is ({drop_of(had.name)})"
        ]
    return []


def _layout_changes(had: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Say what of a saved layout is not so any more; names that it does not have are not compared."""
    told = []
    for name, was in had.items():
        if name not in now:
            told.append(f"{name} was {was!r:.100} and is not there any more")
        elif now[name] != was:
            told.append(f"{name} was {was!r:.100} and is {now[name]!r:.100}")
    return ", ".join(told)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


class KeysMade:
    """The first keys that a flow makes, beside some of those in a snapshot: each type that none of these has is told.

    Numbers are of one type: 1, 1.0 and True are the same key.

    >>> made = KeysMade("total", [1, 2])
    >>> made.others([1, 2.5, True], lambda key: True)
    {}
    >>> made.others([3, "3", "4"], lambda key: True)
    {'str': "step 'total': the snapshot has keys of type int (1), and the flow makes some ...
    >>> made.others(["5"], lambda key: True)
    {}
    """

    def __init__(self, step: str, saved: Sequence[object], most: int = MADE) -> None:
        self.step = step
        self.left = most if saved else 0
        """How many keys are still to be looked at."""
        self._had = saved[0] if saved else None
        self._known = {*map(_kind, saved)}
        self._are_others = True  # whether none so far was of a type of those in the snapshot

    def others(self, keys: Sequence[object], kept: Callable[[object], object]) -> dict[str, str]:
        """Say what is wrong, by the names of types that were not told before; `kept`: whether the step has a key."""
        found: dict[str, str] = {}
        if not self.left:
            return found
        keys = keys[: self.left]
        self.left -= len(keys)
        kinds = [_kind(key) for key in keys]
        self._are_others &= self._known.isdisjoint(kinds)
        some = "" if self._are_others else "some "
        new: dict[object, object] = {}
        for kind, key in zip(kinds, keys, strict=True):
            if kind not in self._known and kind not in new and kept(key):
                new[kind] = key
        self._known.update(new)
        for now in new.values():
            found[_kind_name(now)] = (
                f"step {self.step!r}: the snapshot has keys of type {_kind_name(self._had)} ({self._had!r:.100}), and "
                f"the flow makes {some}keys of type {_kind_name(now)} ({now!r:.100}) now, which find none of the saved "
                "state: make keys as before, or drop the state of this step"
            )
        return found


def other_parts(step: str, saved: Iterable[object], listed: Collection[object]) -> str:
    """Say which parts of a source a snapshot has positions in, and the source does not list now; else nothing.

    >>> other_parts("words", [0, 1, 2, 2], {0, 1})
    "source 'words': the snapshot has positions in parts that the source does not have now: 2"
    """
    gone = [f"{part!r:.100}" for part in dict.fromkeys(saved) if part not in listed]
    if not gone:
        return ""
    more = f" and {len(gone) - 5} more" if len(gone) > 5 else ""
    return (
        f"source {step!r}: the snapshot has positions in parts that the source does not have now: "
        f"{', '.join(gone[:5])}{more}"
    )


def _kind(key: object) -> object:
    """What keys of different types have in common that can be equal."""
    if isinstance(key, tuple):
        return (tuple, *map(_kind, key))
    return Number if isinstance(key, Number) else type(key)


def _kind_name(key: object) -> str:
    if isinstance(key, tuple):
        return f"({', '.join(map(_kind_name, key))})"
    return type(key).__name__
