"""Begin a live flow with the state of its keys from DataFrames.

The rows become a snapshot, and the flow goes on from it as from any other. So state reaches the workers by a proven
way, whatever their number, and a flow that fails at once begins with the same state again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, MapType

from railgun.engine.batch.columns import as_dicts, as_list
from railgun.engine.batch.errors import BatchError
from railgun.engine.batch.stages import Save
from railgun.engine.controller.storekeeper import steps_of
from railgun.engine.operators.operator import shorten
from railgun.engine.snapshots.store import SnapshotStore
from railgun.flows.plan import Plan
from railgun.spark.handover import first_snapshot, task_errors, write_state
from railgun.spark.inputs import listed, named, partition, partitions_for

KEY: Final = "key"
STATE: Final = "state"
_WITH_STATE: Final = ("stateful_map", "reduce", "stateful")


@dataclass(frozen=True, slots=True)
class State:
    """The state of a step's keys, from a DataFrame.

    `key`: the column that has the keys, or several columns: then a key is a tuple. `state` is a function that makes the
    state of a key from a dictionary of the other columns. Without it, that dictionary is the state; or, if the only
    other column is called `state`, its value is the state.
    """

    df: DataFrame
    key: str | Sequence[str] = KEY
    state: Callable[[dict[str, Any]], Any] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of the columns of the key."""
        return (self.key,) if isinstance(self.key, str) else tuple(self.key)


def write_initial_state(
    plan: Plan, states: Mapping[str, DataFrame | State], url: str, job: str
) -> int:
    """Write these states as the first snapshot in its directory; return its number. Raise `BatchError`."""
    checked = {step: _checked(plan, step, state) for step, state in states.items()}
    with first_snapshot(url, job, "initial state") as snapshot:
        frames = [
            _written(plan, step, state, snapshot.save).select("report")
            for step, state in checked.items()
        ]
        with task_errors():
            rows = reduce(DataFrame.unionAll, frames).collect() if frames else []
        snapshot.commit(plan, [json.loads(row["report"]) for row in rows])
        return snapshot.save.snapshot


def _checked(plan: Plan, step: str, given: DataFrame | State) -> State:
    state = given if isinstance(given, State) else State(given)
    if not isinstance(state.df, DataFrame):
        raise BatchError(
            f"the initial state of step {step!r} is a DataFrame, not {state.df!r:.100}"
        )
    kinds = {info.name: info.kind for info in steps_of(plan)}
    if kinds.get(step) not in _WITH_STATE:
        stateful = listed(name for name, kind in kinds.items() if kind in _WITH_STATE)
        problem = "has no state of keys" if step in kinds else "is not in the flow"
        raise BatchError(f"step {step!r} {problem}; the steps with state are {stateful}")
    fields = {field.name: field.dataType for field in state.df.schema.fields}
    for name in state.keys:
        if name not in fields:
            raise BatchError(
                f"the initial state of step {step!r} has no column {name!r} for its keys: it has {listed(fields)}. "
                "State(df, key=...) names the column of the keys"
            )
        if isinstance(fields[name], ArrayType | MapType):
            raise BatchError(
                f"the initial state of step {step!r}: column {name!r} is {fields[name].simpleString()}, which cannot "
                "be a key"
            )
    if len(fields) == len(state.keys):
        raise BatchError(
            f"the initial state of step {step!r} has columns for keys, and none for their state: it has "
            f"{listed(fields)}"
        )
    return state


def _written(plan: Plan, step: str, state: State, save: Save) -> DataFrame:
    """Return a DataFrame that, when computed, writes the state; it has a row for each file."""
    stage = next(s.name for s in plan.stages if any(member.name == step for member in s.steps))
    version = next(info.version for info in steps_of(plan) if info.name == step)
    parts = partitions_for(state.df.sparkSession, [state.df])
    # Equal keys must meet in one partition, so that duplicates are noticed.
    together = state.df.repartition(parts, *map(named, state.keys))
    run = partial(_write, save, stage, step, version, state.keys, state.state)
    return together.mapInArrow(run, "report string")


def _write(
    save: Save,
    stage: str,
    step: str,
    version: int,
    key: tuple[str, ...],
    make_state: Callable[[dict[str, Any]], Any] | None,
    tables: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    states: dict[Any, Any] = {}
    for table in tables:
        names = [name for name in table.schema.names if name not in key]
        keys = _keys([table.column(name) for name in key])
        rows = _states(names, [table.column(name) for name in names])
        if make_state is not None:
            rows = _states_of_rows(step, make_state, keys, names, rows)
        for value, state in zip(keys, rows, strict=True):
            try:
                twice = value in states
            except TypeError as error:
                raise BatchError(
                    f"the initial state of step {step!r}: {shorten(value)} of {listed(key)} cannot be a key: {error}"
                ) from error
            if twice:
                raise BatchError(
                    f"the initial state of step {step!r} has two rows of key {shorten(value)}"
                )
            states[value] = state
    if not states:
        return
    store = SnapshotStore(save.url, save.flow)
    where = stage, step, version, partition()
    part = write_state(store, save, *where, list(states), list(states.values()))
    yield pa.RecordBatch.from_pylist([{"report": json.dumps({"part": asdict(part)})}])


def _keys(columns: Sequence[pa.Array]) -> list[Any]:
    values = [as_list(column) for column in columns]
    for at, column in enumerate(columns):
        if pa.types.is_struct(column.type):
            values[at] = list(map(_as_key, values[at]))
    return values[0] if len(values) == 1 else list(zip(*values, strict=True))


def _as_key(struct: Any) -> Any:
    """Return a struct as a key: the tuple of its fields."""
    return tuple(map(_as_key, struct.values())) if isinstance(struct, dict) else struct


def _states(names: Sequence[str], columns: Sequence[pa.Array]) -> list[Any]:
    if list(names) == [STATE]:
        return as_list(columns[0])
    return as_dicts(names, columns)


def _states_of_rows(
    step: str,
    make_state: Callable[[Any], Any],
    keys: list[Any],
    names: Sequence[str],
    rows: list[Any],
) -> list[Any]:
    if list(names) == [STATE]:
        rows = [{STATE: row} for row in rows]
    states: list[Any] = []
    try:
        states.extend(map(make_state, rows))
    except Exception as error:
        at = len(states)
        raise BatchError(
            f"the initial state of step {step!r}: the function that makes states raised {type(error).__name__}: "
            f"{error} for {shorten(rows[at])} of key {shorten(keys[at])}"
        ) from error
    return states
