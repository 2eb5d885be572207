"""Check whether a snapshot fits a flow: between runs steps may be renamed, dropped, or get a new version of state.

Rules:

1. The state of a step goes to the step of the flow that has its name, or the name it is renamed to. Steps that are new
   in the flow begin without state.
2. State is never dropped unless the user says so: if a step of the snapshot has no place in the flow, the snapshot is
   refused, unless the step is dropped by name. That holds for sinks with prepared output too: the output would never
   become visible.
3. Only a step knows what its state means: state goes only to a step of the same kind. A newer version of state than the
   flow knows is refused. An older one is upgraded by the step's `upgrade(state, from_version)`, called once for each
   version between, and refused if the step has none.
4. A position is valid only within the layout of its source (`Source.layout`). A snapshot with another layout than the
   source has now is refused: going on from it would skip some records and repeat others.
5. Keys of another type than those in the snapshot find none of its state, and parts that a source does not have any
   more cannot be read on. Both may be intended, so they are reported as warnings that name the step (`KeyTypeCheck`,
   `missing_parts`).
6. An option that names an unknown step is a typing mistake, and refused. All problems are reported at once.
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

COMPARED_KEYS = 1_000
"""The number of keys of a step that are compared with those in the snapshot."""


def fit(
    manifest: Manifest,
    steps: Sequence[StepInfo],
    rename: Mapping[str, str],
    drop: Collection[str],
    *,
    flow: str | None = None,
    upgrades: Collection[str] = (),
) -> dict[str, str]:
    """Return where the state of each step of a snapshot goes, from names in the manifest to names in the flow.

    `steps`: the steps of the flow. `rename`, `drop`: what the user chose. `upgrades`: the steps of the flow that can
    upgrade older state. `flow`: the flow's name, if it is to be checked. Raises `DoesNotFitError`, which lists every
    problem.

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
    saved_steps = {step.name: step for step in manifest.steps}
    sinks = dict.fromkeys(sink.step for sink in manifest.sinks)
    names = [*saved_steps, *(name for name in sinks if name not in saved_steps)]
    problems = _unknown_names(names, plan, rename, drop)
    places: dict[str, str] = {}
    unplaced: list[str] = []
    for name in names:
        if name in drop:
            continue
        place = rename.get(name, name)
        if place in plan:
            places[name] = place
            if name in saved_steps:
                problems += _mismatches(saved_steps[name], plan[place], upgrades)
        elif name not in rename:
            unplaced.append(name)
    contested = [place for place, count in Counter(places.values()).items() if count > 1]
    for place in contested:
        sources = _quoted(name for name in places if places[name] == place)
        problems.append(
            f"steps {sources} would all go to step {place!r}: rename or drop all but one"
        )
    for name in unplaced:
        reason = "has state in the snapshot" if name in saved_steps else "has prepared output"
        problems.append(
            f"step {name!r} {reason}, and no place in the flow: {rename_as(name, 'NAME')}, or {drop_of(name)}"
        )
    if problems:
        empty = _quoted(name for name in plan if name not in places.values())
        hint = f"\n  (steps of the flow without state in the snapshot: {empty})" if empty else ""
        details = "".join(f"\n- {line}" for line in problems)
        details += hint if unplaced else ""
        raise DoesNotFitError(
            f"snapshot {manifest.snapshot} of {manifest.flow!r} does not fit this flow:{details}"
        )
    return places


def _unknown_names(
    names: Collection[str],
    plan: Mapping[str, StepInfo],
    rename: Mapping[str, str],
    drop: Collection[str],
) -> list[str]:
    problems = []
    saved_names = f"it has {_quoted(names)}" if names else "it has none"
    for old, new in rename.items():
        if old not in names:
            problems.append(
                f"{rename_as(old, new)}: the snapshot has no step {old!r}; {saved_names}"
            )
        if new not in plan:
            steps_text = _quoted(plan) or "none"
            problems.append(
                f"{rename_as(old, new)}: the flow has no step {new!r} with state; it has {steps_text}"
            )
        if old in drop:
            problems.append(f"step {old!r} cannot be both renamed and dropped")
    problems += [
        f"{drop_of(name)}: the snapshot has no step {name!r}; {saved_names}"
        for name in drop
        if name not in names
    ]
    return problems


def _mismatches(saved: StepInfo, current: StepInfo, upgrades: Collection[str]) -> list[str]:
    step = (
        f"step {saved.name!r}"
        if saved.name == current.name
        else f"step {saved.name!r} → {current.name!r}"
    )
    if saved.kind != current.kind:
        return [
            f"{step} was a {saved.kind} and is a {current.kind}, whose state is another: "
            f"give the new one another name, and {drop_of(saved.name)}"
        ]
    if saved.version > current.version:
        return [
            f"{step} has state of version {saved.version} in the snapshot, and the flow knows up to {current.version}: "
            f"run the newer flow, load an older snapshot, or {drop_of(saved.name)}"
        ]
    if saved.version < current.version and current.name not in upgrades:
        return [
            f"{step} has state of version {saved.version} in the snapshot and {current.version} in the flow, and no "
            f"upgrade(state, from_version): write one, or {drop_of(saved.name)}"
        ]
    changes = _layout_changes(saved.layout or {}, current.layout or {})
    if changes:
        return [
            f"source {current.name!r} divides its records into parts in another way than in the snapshot, so that the "
            f"saved positions mean something else: {changes}. Make the source as it was; "
            f"or begin afresh ({FRESH()}); or read the source again from its start, with the state of all other "
            f"steps as it is ({drop_of(saved.name)})"
        ]
    return []


def _layout_changes(saved: Mapping[str, object], current: Mapping[str, object]) -> str:
    """Describe how a saved layout differs from the present one. Names that it does not have are not compared."""
    changes = []
    for name, saved_value in saved.items():
        if name not in current:
            changes.append(f"{name} was {saved_value!r:.100} and is not there any more")
        elif current[name] != saved_value:
            changes.append(f"{name} was {saved_value!r:.100} and is {current[name]!r:.100}")
    return ", ".join(changes)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


class KeyTypeCheck:
    """Compare the types of a step's first keys with those of keys in a snapshot, and warn of each new type.

    All numbers count as one type, because 1, 1.0 and True are the same key.

    >>> check = KeyTypeCheck("total", [1, 2])
    >>> check.warnings([1, 2.5, True], lambda key: True)
    {}
    >>> check.warnings([3, "3", "4"], lambda key: True)
    {'str': "step 'total': the snapshot has keys of type int (1), and the flow makes some ...
    >>> check.warnings(["5"], lambda key: True)
    {}
    """

    def __init__(self, step: str, saved: Sequence[object], most: int = COMPARED_KEYS) -> None:
        self.step = step
        self.left = most if saved else 0
        """The number of keys that are still to be compared."""
        self._saved_key = saved[0] if saved else None
        self._known = {*map(_comparable_type, saved)}
        self._all_new = True  # whether no key so far was of a type in the snapshot

    def warnings(self, keys: Sequence[object], kept: Callable[[object], object]) -> dict[str, str]:
        """Return a warning for each type of `keys` that is new, by the name of the type.

        `kept`: a function that tells whether the step has state of a key.
        """
        warnings: dict[str, str] = {}
        if not self.left:
            return warnings
        keys = keys[: self.left]
        self.left -= len(keys)
        types = [_comparable_type(key) for key in keys]
        self._all_new &= self._known.isdisjoint(types)
        some_text = "" if self._all_new else "some "
        new: dict[object, object] = {}
        for kind, key in zip(types, keys, strict=True):
            if kind not in self._known and kind not in new and kept(key):
                new[kind] = key
        self._known.update(new)
        for example in new.values():
            name = _type_name(example)
            warnings[name] = (
                f"step {self.step!r}: the snapshot has keys of type {_type_name(self._saved_key)} "
                f"({self._saved_key!r:.100}), and the flow makes {some_text}keys of type {name} ({example!r:.100}) "
                "now, which find none of the saved state: make keys as before, or drop the state of this step"
            )
        return warnings


def missing_parts(step: str, saved: Iterable[object], listed: Collection[object]) -> str:
    """Return a warning that names the parts in which a snapshot has positions but which the source does not list now.

    The text is empty if there are none.

    >>> missing_parts("words", [0, 1, 2, 2], {0, 1})
    "source 'words': the snapshot has positions in parts that the source does not have now: 2"
    """
    missing = [f"{part!r:.100}" for part in dict.fromkeys(saved) if part not in listed]
    if not missing:
        return ""
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return (
        f"source {step!r}: the snapshot has positions in parts that the source does not have now: "
        f"{', '.join(missing[:5])}{more}"
    )


def _comparable_type(key: object) -> object:
    """Return the type of a key, the same for types whose keys can be equal."""
    if isinstance(key, tuple):
        return (tuple, *map(_comparable_type, key))
    return Number if isinstance(key, Number) else type(key)


def _type_name(key: object) -> str:
    if isinstance(key, tuple):
        return f"({', '.join(map(_type_name, key))})"
    return type(key).__name__
