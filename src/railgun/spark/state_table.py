"""The state of a flow as a Spark table.

    totals = railgun.state_table(spark, "railgun-snapshots", "total")
    changes = railgun.state_changes(spark, "railgun-snapshots#6", "railgun-snapshots#7", "total")

or, by the format `railgun-state`, in SQL too::

    CREATE TEMPORARY VIEW totals USING `railgun-state` OPTIONS (path 'railgun-snapshots', step 'total')

Rules:

1. Rows are put together by tasks (`saved_rows`); the driver reads manifests, and no state but to learn its types.
2. A table is of one snapshot, which is chosen when the table is made. If a job that goes on has cleaned it away,
   reading it is an error, not another snapshot.
3. Types: a user's schema is taken as it is. `state_table` looks at all rows, by a Spark job if they are many. The
   format cannot start jobs: it looks at up to `LOOKED_AT` rows by itself; if there are more, it looks at every so
   many-th share of them, and a row that does not fit what it has seen is an error, never a field less (option `infer`).
4. The session is the caller's: it is never stopped, and none of its settings is changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from railgun.engine.controller.storekeeper import parse_begin
from railgun.errors import RailgunError
from railgun.spark import kinds
from railgun.spark.saved_changes import Between
from railgun.spark.saved_rows import Saved, Whole
from railgun.spark.states import Maker, Opening, Seen

FORMAT: Final = "railgun-state"
LOOKED_AT: Final = 2_000_000
"""Rows that the format looks at to guess a schema; of more it looks at about as many."""

ALONE: Final = 200_000
"""Rows that `state_table` looks at by itself; for more it starts a job."""

OPTIONS: Final = ("path", "step", "snapshot", "flow", "since", "until", "unpickle", "infer")
_KINDS: Final = "kinds"  # ours: each task tells the kinds it has seen, instead of rows
_TIME: Final = t.TimestampType()
_OF_STATE: Final[dict[str, t.DataType]] = {
    "worker": t.IntegerType(),
    "saved": t.LongType(),
    "changed_at": _TIME,
    "timers": t.ArrayType(_TIME),
    "ended": t.BooleanType(),
    "version": t.IntegerType(),
}
_OF_CHANGES: Final[dict[str, t.DataType]] = {"change": t.StringType(), "changed_at": _TIME}


class StateTableError(RailgunError):
    """A table of state is asked for in a way that makes no sense."""


def state_table(
    spark: SparkSession,
    snapshot: str | os.PathLike[str],
    step: str,
    *,
    flow: str | None = None,
    schema: t.StructType | str | None = None,
    unpickle: bool = False,
) -> DataFrame:
    """The state of a step, one row a key, out of a snapshot.

    `snapshot` is a directory of snapshots, or a URL, of which it is the latest; or `DIRECTORY#NUMBER`. `flow` is needed
    if several have snapshots there. `schema` names the columns that are wanted, and their types, if they are not to be
    guessed. `unpickle` opens also such states as are of the flow's own classes, which runs what is in them.
    """
    told = _asked(snapshot, "snapshot", flow, step) | _if_said(unpickle)
    return _frame(spark, told, schema)


def state_changes(
    spark: SparkSession,
    before: str | int | os.PathLike[str],
    after: str | os.PathLike[str],
    step: str,
    *,
    flow: str | None = None,
    schema: t.StructType | str | None = None,
    unpickle: bool = False,
) -> DataFrame:
    """What has changed in the state of a step between two snapshots, one row a key that differs.

    `before` and `after` are said like the snapshot of `state_table`; for `before` a number will do, if it is in the
    same directory.
    """
    told = _asked(after, "until", flow, step) | _if_said(unpickle)
    return _frame(spark, told | {"since": str(before)}, schema)


def _asked(
    snapshot: str | os.PathLike[str], name: str, flow: str | None, step: str
) -> dict[str, str]:
    directory, number = parse_begin(os.fspath(snapshot))
    if directory is None:
        raise StateTableError(
            f"{snapshot!r} says which snapshot, and not where: name it as DIRECTORY#NUMBER"
        )
    told = {"path": directory, "step": step, name: None if number is None else str(number)}
    return {option: value for option, value in (told | {"flow": flow}).items() if value is not None}


def _if_said(unpickle: bool) -> dict[str, str]:
    return {"unpickle": "true"} if unpickle else {}


def _frame(
    spark: SparkSession, told: dict[str, str], schema: t.StructType | str | None
) -> DataFrame:
    table = Table.of(told)  # errors are told here, as what they are
    told = table.options()
    if schema is None:
        seen = table.seen() if len(table) <= ALONE else _seen_by_tasks(spark, told)
        schema = table.schema(seen)
    return _load(spark, told, schema)


def _seen_by_tasks(spark: SparkSession, told: dict[str, str]) -> Seen:
    seen = Seen()
    for row in _load(spark, told | {_KINDS: "true"}, "kinds string").collect():
        seen.merge(Seen(**json.loads(row.kinds)))
    return seen


def _load(spark: SparkSession, told: dict[str, str], schema: t.StructType | str) -> DataFrame:
    def load() -> DataFrame:
        return spark.read.format(FORMAT).options(**told).schema(schema).load()

    try:
        return load()
    except Exception as error:  # of several types: the JVM's own for one
        if "DATA_SOURCE_NOT_FOUND" not in str(error):
            raise
    # Spark has looked for formats before this one could be found.
    from pyspark_railgun_state import DefaultSource

    spark.dataSource.register(DefaultSource)
    return load()


# ------------------------------------------------------------ the format


@dataclass(frozen=True, slots=True)
class Table:
    """What is asked for, found."""

    rows: Whole | Between
    opening: Opening
    infer_all: bool = False
    only_kinds: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def of(told: Mapping[str, str]) -> Table:
        """By the options of a user."""
        given = {name.lower(): value for name, value in told.items()}
        _check(given)
        url, step, flow = given["path"], given["step"], given.get("flow")
        which = "until" if "until" in given else "snapshot"
        number = _number(which, given[which]) if which in given else None
        if number is None:
            directory, at = parse_begin(url)
            url, number = (url, None) if directory is None else (directory, at)
        saved = Saved.find(url, number, flow, step)
        rows: Whole | Between = Whole(saved)
        if "since" in given:
            directory, number = parse_begin(given["since"])
            rows = Between(Saved.find(directory or url, number, flow or saved.flow, step), saved)
        opening = Opening(step, saved.is_source, _is_true(given, "unpickle"))
        infer_all = given.get("infer", "some").lower() == "all"
        return Table(rows, opening, infer_all, _is_true(given, _KINDS))

    def options(self) -> dict[str, str]:
        """Options that say the very same, whatever is committed in the meantime."""
        rows = self.rows
        saved = rows.after if isinstance(rows, Between) else rows.saved
        told = {"path": saved.url, "flow": saved.flow, "step": saved.step}
        told["snapshot"] = str(saved.snapshot)
        if isinstance(rows, Between):
            told["since"] = f"{rows.before.url}#{rows.before.snapshot}"
        return told | _if_said(self.opening.unpickle)

    def guessed(self) -> t.StructType:
        """The columns, by what is in some of the rows, or in all."""
        return self.schema(self.seen(None if self.infer_all else LOOKED_AT))

    def seen(self, most: int | None = None) -> Seen:
        """What the rows have in common; or about so many of them."""
        shares: list[Any] = list(self.rows.shares())
        if most is not None and len(self) > most:
            shares = shares[:: -(-len(self) // most)]
        seen = Seen()
        for share in shares:
            seen.merge(self._seen(share))
        return seen

    def _seen(self, share: Any) -> Seen:
        seen = Seen()
        for block in self.rows.blocks(share):
            seen.look(block, self.opening)
        return seen

    def schema(self, seen: Seen) -> t.StructType:
        """The columns, by what was seen."""
        state = kinds.type_of(seen.states)
        columns: dict[str, t.DataType] = {"key": kinds.type_of(seen.keys)}
        if isinstance(self.rows, Between):
            columns["change"] = t.StringType()
        columns |= dict.fromkeys(self._states(), state) | self._others()
        if seen.sealed:
            columns |= {f"{name}_pickle": t.BinaryType() for name in self._states()}
        return t.StructType([t.StructField(name, kind) for name, kind in columns.items()])

    def _states(self) -> tuple[str, ...]:
        return ("before", "after") if isinstance(self.rows, Between) else ("state",)

    def _others(self) -> dict[str, t.DataType]:
        return _OF_CHANGES if isinstance(self.rows, Between) else _OF_STATE

    def check(self, schema: t.StructType) -> None:
        """Refuse columns there are none of, and types they cannot have."""
        fixed = self._others() | {f"{name}_pickle": t.BinaryType() for name in self._states()}
        for field in schema:
            name, wanted = field.name, field.dataType
            if name in self._states():
                kinds.fit(wanted, name)
            elif name == "key":
                if not isinstance(wanted, t.StringType | t.LongType | t.IntegerType):
                    raise kinds.misfit(
                        name, wanted.simpleString(), "type of keys: string or bigint"
                    )
            elif name not in fixed:
                there = ", ".join(("key", *self._states(), *fixed))
                raise StateTableError(f"there is no column {name!r}; there are {there}")
            elif wanted != fixed[name] and not (name == "timers" and _are_times(wanted)):
                raise StateTableError(
                    f"column {name!r} is of type {fixed[name].simpleString()}, not {wanted.simpleString()}"
                )


class StateReader(DataSourceReader):
    """Reads a table by tasks."""

    def __init__(self, table: Table, schema: t.StructType, guessed: bool) -> None:
        if not table.only_kinds:
            table.check(schema)
        self.table = table
        self._schema = schema
        self._strict = guessed

    def partitions(self) -> list[InputPartition]:
        """A task for each share of the rows."""
        return [InputPartition(share) for share in self.table.rows.shares()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a share."""
        if partition.value is None:  # Spark's own, if there are no shares
            return
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        if self.table.only_kinds:
            seen = self.table._seen(partition.value)
            yield pa.RecordBatch.from_arrays([pa.array([json.dumps(asdict(seen))])], schema=arrow)
            return
        maker = Maker(self._schema, arrow, self.table.opening, self._strict)
        for block in self.table.rows.blocks(partition.value):
            yield maker.batch(block)


def _check(given: Mapping[str, str]) -> None:
    for name in given:
        if name not in (*OPTIONS, _KINDS):
            raise StateTableError(f"there is no option {name!r}; there are {', '.join(OPTIONS)}")
    if not given.get("path"):
        raise StateTableError("say where the snapshots are: load(DIRECTORY), or the option path")
    if not given.get("step"):
        raise StateTableError(
            "say of which step the state is: the option step. `railgun state --dir DIRECTORY` tells which there are"
        )
    if "until" in given and ("snapshot" in given or "since" not in given):
        raise StateTableError("the option until goes with since, and not with snapshot")
    if given.get("infer", "some").lower() not in ("some", "all"):
        raise StateTableError(f"the option infer is some or all, not {given['infer']!r}")


def _number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise StateTableError(f"the option {option} is the number of a snapshot, not {text!r}")
    return int(text)


def _is_true(given: Mapping[str, str], option: str) -> bool:
    value = given.get(option, "false").lower()
    if value not in ("true", "false"):
        raise StateTableError(f"the option {option} is true or false, not {value!r}")
    return value == "true"


def _are_times(wanted: t.DataType) -> bool:
    return isinstance(wanted, t.ArrayType) and wanted.elementType == _TIME
