"""Does a snapshot fit a flow? Flows change between runs: steps are renamed, dropped, given another version of state.

Rules:

1. A step of the snapshot goes to the step of the flow that has its name, or the name it is renamed to. Steps that are
   new in the flow begin without state.
2. State is never dropped because nobody asked: a step of the snapshot that has no place in the flow is refused, unless
   it is dropped by name. That holds for sinks with prepared output, too: it would never become visible.
3. What state means is the step's matter: it goes only to a step of the same kind. A newer version of state than the
   flow knows is refused; an older one is brought up by the step's `upgrade(state, from_version)`, called once for each
   version between, and refused if the step has none.
4. A name that is given and leads nowhere is a slip of the pen, and refused. All that is wrong is told at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from railgun.snapshots.errors import DoesNotFitError
from railgun.snapshots.manifest import Manifest, StepInfo


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
    railgun.snapshots.errors.DoesNotFitError: snapshot 7 of 'demo' does not fit this flow:
    - step 'total' has state in the snapshot, and no place in the flow: --rename total=NAME, or --drop-state total
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
            f"step {name!r} {what}, and no place in the flow: --rename {name}=NAME, or --drop-state {name}"
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
            wrong.append(f"--rename {old}={new}: the snapshot has no step {old!r}; {there}")
        if new not in plan:
            known = _listed(plan) or "none"
            wrong.append(
                f"--rename {old}={new}: the flow has no step {new!r} with state; it has {known}"
            )
        if old in drop:
            wrong.append(f"step {old!r} cannot be both renamed and dropped")
    wrong += [
        f"--drop-state {name}: the snapshot has no step {name!r}; {there}"
        for name in drop
        if name not in names
    ]
    return wrong


def _misfits(had: StepInfo, now: StepInfo, upgrades: Collection[str]) -> list[str]:
    where = f"step {had.name!r}" if had.name == now.name else f"step {had.name!r} → {now.name!r}"
    if had.kind != now.kind:
        return [
            f"{where} was a {had.kind} and is a {now.kind}, whose state is another: give the new one another name, "
            f"and --drop-state {had.name}"
        ]
    if had.version > now.version:
        return [
            f"{where} has state of version {had.version} in the snapshot, and the flow knows up to {now.version}: "
            f"run the newer flow, load an older snapshot, or --drop-state {had.name}"
        ]
    if had.version < now.version and now.name not in upgrades:
        return [
            f"{where} has state of version {had.version} in the snapshot and {now.version} in the flow, and no "
            f"upgrade(state, from_version): write one, or --drop-state {had.name}"
        ]
    return []


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
