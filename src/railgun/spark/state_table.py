"""Read the state of a flow as a Spark table.

    totals = railgun.state_table(spark, "railgun-snapshots", "total")
    changes = railgun.state_changes(spark, "railgun-snapshots#6", "railgun-snapshots#7", "total")

or, by the format `railgun-state`, in SQL too::

    CREATE TEMPORARY VIEW totals USING `railgun-state` OPTIONS (path 'railgun-snapshots', step 'total')

Rules:

1. Tasks read the rows (`saved_rows`); the driver reads manifests, and state only to infer its types.
2. A table is of one snapshot, which is chosen when the table is made. If a running job has deleted the snapshot,
   reading the table is an error; another snapshot is never read instead.
3. Types: a user's schema is taken as it is. `state_table` looks at all rows, with a Spark job if they are many. The
   format cannot start jobs: it looks at up to `SAMPLE_ROWS` rows by itself. If there are more, it looks at shares at
   regular intervals; a row that does not fit the inferred types is then an error, and no field is ever dropped (option
   `infer`).
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
from railgun.spark.saved_changes import StepChanges
from railgun.spark.saved_rows import SavedStep, StepRows
from railgun.spark.states import SeenKinds, StateDecoder, TableEncoder

FORMAT: Final = "railgun-state"
SAMPLE_ROWS: Final = 2_000_000
"""The rows that the format looks at to infer a schema; if there are more, it looks at about as many."""

DRIVER_ROWS: Final = 200_000
"""The rows that `state_table` looks at by itself; if there are more, it starts a job."""

OPTIONS: Final = ("path", "step", "snapshot", "flow", "since", "until", "unpickle", "infer")
_KINDS: Final = "kinds"  # internal: each task returns the kinds it has seen instead of rows
_TIME: Final = t.TimestampType()
_STATE_COLUMNS: Final[dict[str, t.DataType]] = {
    "worker": t.IntegerType(),
    "saved": t.LongType(),
    "changed_at": _TIME,
    "timers": t.ArrayType(_TIME),
    "ended": t.BooleanType(),
    "version": t.IntegerType(),
}
_CHANGE_COLUMNS: Final[dict[str, t.DataType]] = {"change": t.StringType(), "changed_at": _TIME}


class StateTableError(RailgunError):
    """The options of a state table make no sense."""


def state_table(
    spark: SparkSession,
    snapshot: str | os.PathLike[str],
    step: str,
    *,
    flow: str | None = None,
    schema: t.StructType | str | None = None,
    unpickle: bool = False,
) -> DataFrame:
    """Return the state of a step in a snapshot as a DataFrame, one row per key.

    `snapshot`: a directory of snapshots, or its URL, for the latest snapshot; or `DIRECTORY#NUMBER`. `flow`: needed if
    several flows have snapshots there. `schema`: the columns wanted and their types, instead of inferred ones.
    `unpickle`: also unpickle states of the flow's own classes, which runs their code.
    """
    options = _options(snapshot, "snapshot", flow, step) | _unpickle_option(unpickle)
    return _frame(spark, options, schema)


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
    """Return the keys of a step whose state differs between two snapshots as a DataFrame, one row per key.

    `before` and `after` name snapshots as in `state_table`; `before` may be just a number, if it is in the same
    directory.
    """
    options = _options(after, "until", flow, step) | _unpickle_option(unpickle)
    return _frame(spark, options | {"since": str(before)}, schema)


def _options(
    snapshot: str | os.PathLike[str], name: str, flow: str | None, step: str
) -> dict[str, str]:
    directory, number = parse_begin(os.fspath(snapshot))
    if directory is None:
        raise StateTableError(
            f"{snapshot!r} has the number of a snapshot but no directory: name it as DIRECTORY#NUMBER"
        )
    options = {"path": directory, "step": step, name: None if number is None else str(number)}
    return {
        option: value for option, value in (options | {"flow": flow}).items() if value is not None
    }


def _unpickle_option(unpickle: bool) -> dict[str, str]:
    return {"unpickle": "true"} if unpickle else {}


def _frame(
    spark: SparkSession, options: dict[str, str], schema: t.StructType | str | None
) -> DataFrame:
    table = Table.of(options)  # raises errors here, before Spark wraps them
    options = table.options()
    if schema is None:
        seen = table.seen() if len(table) <= DRIVER_ROWS else _seen_by_tasks(spark, options)
        schema = table.schema(seen)
    return _load(spark, options, schema)


def _seen_by_tasks(spark: SparkSession, options: dict[str, str]) -> SeenKinds:
    seen = SeenKinds()
    for row in _load(spark, options | {_KINDS: "true"}, "kinds string").collect():
        seen.merge(SeenKinds(**json.loads(row.kinds)))
    return seen


def _load(spark: SparkSession, options: dict[str, str], schema: t.StructType | str) -> DataFrame:
    def load() -> DataFrame:
        return spark.read.format(FORMAT).options(**options).schema(schema).load()

    try:
        return load()
    except Exception as error:  # of several types, one of them the JVM's
        if "DATA_SOURCE_NOT_FOUND" not in str(error):
            raise
    # Spark looked for formats before this one was installed.
    from pyspark_railgun_state import DefaultSource

    spark.dataSource.register(DefaultSource)
    return load()


# ------------------------------------------------------------ the format


@dataclass(frozen=True, slots=True)
class Table:
    """A state table: what its options ask for."""

    rows: StepRows | StepChanges
    decoder: StateDecoder
    infer_all: bool = False
    only_kinds: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def of(options: Mapping[str, str]) -> Table:
        """Return the table for a user's options; raise `StateTableError` if they make no sense."""
        by_name = {name.lower(): value for name, value in options.items()}
        _check(by_name)
        url, step, flow = by_name["path"], by_name["step"], by_name.get("flow")
        snapshot_option = "until" if "until" in by_name else "snapshot"
        number = (
            _number(snapshot_option, by_name[snapshot_option])
            if snapshot_option in by_name
            else None
        )
        if number is None:
            directory, at = parse_begin(url)
            url, number = (url, None) if directory is None else (directory, at)
        saved = SavedStep.find(url, number, flow, step)
        rows: StepRows | StepChanges = StepRows(saved)
        if "since" in by_name:
            directory, number = parse_begin(by_name["since"])
            rows = StepChanges(
                SavedStep.find(directory or url, number, flow or saved.flow, step), saved
            )
        decoder = StateDecoder(step, saved.is_source, _is_true(by_name, "unpickle"))
        infer_all = by_name.get("infer", "some").lower() == "all"
        return Table(rows, decoder, infer_all, _is_true(by_name, _KINDS))

    def options(self) -> dict[str, str]:
        """Return options that name exactly this table, whatever is committed in the meantime."""
        rows = self.rows
        saved = rows.after if isinstance(rows, StepChanges) else rows.saved
        options = {"path": saved.url, "flow": saved.flow, "step": saved.step}
        options["snapshot"] = str(saved.snapshot)
        if isinstance(rows, StepChanges):
            options["since"] = f"{rows.before.url}#{rows.before.snapshot}"
        return options | _unpickle_option(self.decoder.unpickle)

    def inferred_schema(self) -> t.StructType:
        """Return the columns, inferred from a sample of the rows, or from all rows with `infer_all`."""
        return self.schema(self.seen(None if self.infer_all else SAMPLE_ROWS))

    def seen(self, max_rows: int | None = None) -> SeenKinds:
        """Return the kinds of all rows, or of about `max_rows` of them."""
        shares: list[Any] = list(self.rows.shares())
        if max_rows is not None and len(self) > max_rows:
            shares = shares[:: -(-len(self) // max_rows)]
        seen = SeenKinds()
        for share in shares:
            seen.merge(self._seen(share))
        return seen

    def _seen(self, share: Any) -> SeenKinds:
        seen = SeenKinds()
        for block in self.rows.blocks(share):
            seen.look(block, self.decoder)
        return seen

    def schema(self, seen: SeenKinds) -> t.StructType:
        """Return the columns for the kinds that were seen."""
        state = kinds.type_of(seen.states)
        columns: dict[str, t.DataType] = {"key": kinds.type_of(seen.keys)}
        if isinstance(self.rows, StepChanges):
            columns["change"] = t.StringType()
        columns |= dict.fromkeys(self._states(), state) | self._others()
        if seen.sealed:
            columns |= {f"{name}_pickle": t.BinaryType() for name in self._states()}
        return t.StructType([t.StructField(name, kind) for name, kind in columns.items()])

    def _states(self) -> tuple[str, ...]:
        return ("before", "after") if isinstance(self.rows, StepChanges) else ("state",)

    def _others(self) -> dict[str, t.DataType]:
        return _CHANGE_COLUMNS if isinstance(self.rows, StepChanges) else _STATE_COLUMNS

    def check(self, schema: t.StructType) -> None:
        """Raise an error if the table has no such column, or if a column cannot have the wanted type."""
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
                columns = ", ".join(("key", *self._states(), *fixed))
                raise StateTableError(f"there is no column {name!r}; the columns are {columns}")
            elif wanted != fixed[name] and not (name == "timers" and _are_times(wanted)):
                raise StateTableError(
                    f"column {name!r} is of type {fixed[name].simpleString()}, not {wanted.simpleString()}"
                )


class StateReader(DataSourceReader):
    """Reads a state table with Spark tasks."""

    def __init__(self, table: Table, schema: t.StructType, inferred: bool) -> None:
        if not table.only_kinds:
            table.check(schema)
        self.table = table
        self._schema = schema
        self._strict = inferred

    def partitions(self) -> list[InputPartition]:
        """Return a partition for each share of the rows."""
        return [InputPartition(share) for share in self.table.rows.shares()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a share."""
        if partition.value is None:  # Spark makes such a partition if there are no shares
            return
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        if self.table.only_kinds:
            seen = self.table._seen(partition.value)
            yield pa.RecordBatch.from_arrays([pa.array([json.dumps(asdict(seen))])], schema=arrow)
            return
        maker = TableEncoder(self._schema, arrow, self.table.decoder, self._strict)
        for block in self.table.rows.blocks(partition.value):
            yield maker.batch(block)


def _check(options: Mapping[str, str]) -> None:
    for name in options:
        if name not in (*OPTIONS, _KINDS):
            raise StateTableError(
                f"there is no option {name!r}; the options are {', '.join(OPTIONS)}"
            )
    if not options.get("path"):
        raise StateTableError(
            "the directory of the snapshots is missing: load(DIRECTORY), or set the option path"
        )
    if not options.get("step"):
        raise StateTableError(
            "the step is missing: set the option step. `railgun state --dir DIRECTORY` lists the steps"
        )
    if "until" in options and ("snapshot" in options or "since" not in options):
        raise StateTableError("the option until goes with since, and not with snapshot")
    if options.get("infer", "some").lower() not in ("some", "all"):
        raise StateTableError(f"the option infer is some or all, not {options['infer']!r}")


def _number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise StateTableError(f"the option {option} is the number of a snapshot, not {text!r}")
    return int(text)


def _is_true(options: Mapping[str, str], option: str) -> bool:
    value = options.get(option, "false").lower()
    if value not in ("true", "false"):
        raise StateTableError(f"the option {option} is true or false, not {value!r}")
    return value == "true"


def _are_times(wanted: t.DataType) -> bool:
    return isinstance(wanted, t.ArrayType) and wanted.elementType == _TIME
