"""State from tables: a live flow begins with what DataFrames say its keys have.

The rows become a snapshot, which the flow goes on from as it does from any other: so state reaches the workers by the
way that is proven, whatever their number, and a flow that fails at once begins with it again.
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
from railgun.spark.handover import making, told_by_tasks, write_state
from railgun.spark.inputs import listed, named, partition, partitions_for

KEY: Final = "key"
STATE: Final = "state"
_WITH_STATE: Final = ("stateful_map", "reduce", "stateful")


@dataclass(frozen=True, slots=True)
class State:
    """What the keys of a step have, from a DataFrame.

    `key`: the column that has the keys, or several: then a key is a tuple. `state` makes the state of a key from a
    dictionary of the other columns; without, that dictionary is the state, or, if the one other column is called
    `state`, what is in it.
    """

    df: DataFrame
    key: str | Sequence[str] = KEY
    state: Callable[[dict[str, Any]], Any] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the key."""
        return (self.key,) if isinstance(self.key, str) else tuple(self.key)


def write_initial_state(
    plan: Plan, states: Mapping[str, DataFrame | State], url: str, job: str
) -> int:
    """Make a snapshot of these states, the first in its directory; its number."""
    given = {step: _checked(plan, step, state) for step, state in states.items()}
    with making(url, job, "initial state") as snapshot:
        frames = [
            _written(plan, step, state, snapshot.save).select("told")
            for step, state in given.items()
        ]
        with told_by_tasks():
            told = reduce(DataFrame.unionAll, frames).collect() if frames else []
        snapshot.commit(plan, [json.loads(row["told"]) for row in told])
        return snapshot.save.snapshot


def _checked(plan: Plan, step: str, given: DataFrame | State) -> State:
    state = given if isinstance(given, State) else State(given)
    if not isinstance(state.df, DataFrame):
        raise BatchError(
            f"the initial state of step {step!r} is a DataFrame, not {state.df!r:.100}"
        )
    known = {info.name: info.kind for info in steps_of(plan)}
    if known.get(step) not in _WITH_STATE:
        has = listed(name for name, kind in known.items() if kind in _WITH_STATE)
        what = "has no state of keys" if step in known else "is not in the flow"
        raise BatchError(f"step {step!r} {what}; those that have are {has}")
    fields = {field.name: field.dataType for field in state.df.schema.fields}
    for name in state.keys:
        if name not in fields:
            raise BatchError(
                f"the initial state of step {step!r} has no column {name!r} for its keys: it has {listed(fields)}. "
                "State(df, key=...) says which it is"
            )
        if isinstance(fields[name], ArrayType | MapType):
            raise BatchError(
                f"the initial state of step {step!r}: column {name!r} is {fields[name].simpleString()}, which cannot "
                "be a key"
            )
    if len(fields) == len(state.keys):
        raise BatchError(
            f"the initial state of step {step!r} has keys, and nothing that would be their state: it has "
            f"{listed(fields)}"
        )
    return state


def _written(plan: Plan, step: str, state: State, save: Save) -> DataFrame:
    """A DataFrame that is computed by writing the state, and has a row for each file."""
    stage = next(s.name for s in plan.stages if any(one.name == step for one in s.steps))
    version = next(info.version for info in steps_of(plan) if info.name == step)
    parts = partitions_for(state.df.sparkSession, [state.df])
    # Equal keys come together: one that comes twice is found.
    together = state.df.repartition(parts, *map(named, state.keys))
    run = partial(_write, save, stage, step, version, state.keys, state.state)
    return together.mapInArrow(run, "told string")


def _write(
    save: Save,
    stage: str,
    step: str,
    version: int,
    key: tuple[str, ...],
    make: Callable[[dict[str, Any]], Any] | None,
    tables: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    found: dict[Any, Any] = {}
    for table in tables:
        names = [name for name in table.schema.names if name not in key]
        keys = _keys([table.column(name) for name in key])
        rows = _states(names, [table.column(name) for name in names])
        if make is not None:
            rows = _made(step, make, keys, names, rows)
        for one, state in zip(keys, rows, strict=True):
            try:
                twice = one in found
            except TypeError as error:
                raise BatchError(
                    f"the initial state of step {step!r}: {shorten(one)} of {listed(key)} cannot be a key: {error}"
                ) from error
            if twice:
                raise BatchError(
                    f"the initial state of step {step!r} has two rows of key {shorten(one)}"
                )
            found[one] = state
    if not found:
        return
    store = SnapshotStore(save.url, save.flow)
    where = stage, step, version, partition()
    part = write_state(store, save, *where, list(found), list(found.values()))
    yield pa.RecordBatch.from_pylist([{"told": json.dumps({"part": asdict(part)})}])


def _keys(columns: Sequence[pa.Array]) -> list[Any]:
    found = [as_list(column) for column in columns]
    for at, column in enumerate(columns):
        if pa.types.is_struct(column.type):
            found[at] = list(map(_as_key, found[at]))
    return found[0] if len(found) == 1 else list(zip(*found, strict=True))


def _as_key(struct: Any) -> Any:
    """A struct as a key: its fields, in order."""
    return tuple(map(_as_key, struct.values())) if isinstance(struct, dict) else struct


def _states(names: Sequence[str], columns: Sequence[pa.Array]) -> list[Any]:
    if list(names) == [STATE]:
        return as_list(columns[0])
    return as_dicts(names, columns)


def _made(
    step: str, make: Callable[[Any], Any], keys: list[Any], names: Sequence[str], rows: list[Any]
) -> list[Any]:
    if list(names) == [STATE]:
        rows = [{STATE: row} for row in rows]
    made: list[Any] = []
    try:
        made.extend(map(make, rows))
    except Exception as error:
        at = len(made)
        raise BatchError(
            f"the initial state of step {step!r}: the function that makes states raised {type(error).__name__}: "
            f"{error} for {shorten(rows[at])} of key {shorten(keys[at])}"
        ) from error
    return made
