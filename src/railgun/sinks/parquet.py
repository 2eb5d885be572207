"""Write results as tables in Parquet files, to be read with Spark, pandas, Arrow or a database.

Rules:

1. Items are rows: dictionaries, dataclasses, named tuples; or tuples, if a schema gives their columns names. Every
   field of an item must have a column; a column that an item lacks is null.
2. Without a schema, the first batch of items decides: its columns and their types are those of the whole output, on all
   workers and from run to run. The first worker that gets items writes them to `.staged/<flow>/<step>/schema`, and the
   others read that file. A column with only None in the first batch has no type, and is refused.
3. An item that does not fit (a column that is not in the schema, a value that its type cannot hold as it is) is an
   error that names the step, the item and the column. Nothing is cut, rounded to an integer, or left out.
4. Exactly once, the default of a flow that takes snapshots: one file for each snapshot and worker,
   `part-<step>-<snapshot>-<worker>-<generation>-<random>.parquet`, which appears when the snapshot is on disk. Every
   worker, and the program that starts the flow, must see the same directory.
5. At least once, and in a flow without snapshots: a file `part-<step>-<worker>-<generation>-<random>.parquet` appears,
   complete, every `every` seconds, or when it has `size` bytes, or with a snapshot, or when the worker ends. Files that
   a killed worker leaves in `.staged` are of no use any more; without snapshots they are never deleted.
6. `staging.py` says how files appear, whatever crashes.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, timedelta
from datetime import time as dt_time
from numbers import Number
from pathlib import Path
from typing import Any, Final

from railgun.engine.operators.operator import DeadLetter, shorten
from railgun.flows.errors import ConnectorError
from railgun.flows.sink import Place, Token, TwoPhaseWriter, Writer
from railgun.lazy import need_extra
from railgun.sinks.files import as_json
from railgun.sinks.staging import Mode, StagedFile, StagedSink, Staging

# pyarrow is imported where it is needed: that takes a while, and most flows do not need it.

# Bytes in memory that become a row group: few enough to be written without a long pause
_GROUP_BYTES: Final = 8 << 20
_SCHEMA_FILE: Final = "schema"


class Parquet(StagedSink):
    """Writes rows to Parquet files of a directory, which is made if missing.

    `schema`: a `pyarrow.Schema`, or an argument for `pyarrow.schema`.

    >>> import tempfile, pyarrow, pandas
    >>> directory = Path(tempfile.mkdtemp()) / "out"
    >>> sink = Parquet(directory, {"name": pyarrow.string(), "n": pyarrow.int64()})
    >>> writer = sink.open(Place("demo", "totals", worker=3, generation=1))
    >>> writer.write([{"name": "ada", "n": 1}, ("grace", 2)]); writer.close()
    >>> pandas.read_parquet(directory).to_dict("records")
    [{'name': 'ada', 'n': 1}, {'name': 'grace', 'n': 2}]

    If the flow takes snapshots, rows appear with them, exactly once. If not, or with `mode="at-least-once"`, a file
    appears every `every` seconds, or when it has `size` bytes.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        schema: Any = None,
        mode: Mode = "exactly-once",
        *,
        every: float = 60.0,
        size: int = 64 << 20,
    ) -> None:
        super().__init__(directory, mode)
        if schema is not None:
            schema = _schema(f"Parquet({str(directory)!r})", schema)
        self.schema = schema
        self.every = every
        self.size = size

    def open(self, place: Place) -> Writer[Any]:
        """Return the writer of one worker."""
        need_extra("pyarrow")  # now, not with the first items
        import pyarrow.parquet  # noqa: F401

        staging = Staging(self.directory, place, ".parquet")
        return _Writer(self, staging, place.transactional and self.mode == "exactly-once")


class _Writer(TwoPhaseWriter[Any]):
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, sink: Parquet, staging: Staging, exact: bool) -> None:
        self.sink = sink
        self.staging = staging
        self.exact = exact
        self.rows: Rows | None = None
        self.batches: list[Any] = []
        self.waiting = 0  # bytes in `batches`
        self.staged: StagedFile | None = None
        self.sealed: StagedFile | None = None  # the last file that was cut
        self.parquet: Any = None
        self.began = 0.0  # when the first row of the current file came

    def write(self, items: Sequence[Any]) -> None:
        if not items:
            return
        if self.rows is None:
            self.rows = self._begin(items)
        batch = self.rows.encode(items)
        if not self.batches and self.staged is None:
            self.began = self.clock()
        self.batches.append(batch)
        self.waiting += batch.nbytes
        if self.waiting >= _GROUP_BYTES:
            self._write_group()
        if not self.exact and self.staged is not None and self._size() >= self.sink.size:
            self._publish()

    def flush(self) -> None:
        pending = self.batches or self.staged is not None
        if pending and not self.exact and self.clock() - self.began >= self.sink.every:
            self._publish()

    def prepare(self, snapshot: int) -> Token | None:
        return self.cut(snapshot)()

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        if not self.exact:
            self._publish()
            return lambda: None
        if self.sealed is not None:
            self.sealed.check()
        staged = self._finish()
        self.sealed, self.staged = staged, None
        return lambda: None if staged is None else staged.seal(snapshot)

    def close(self) -> None:
        try:
            if not self.exact:
                self._publish()
        finally:
            self.batches, self.waiting = [], 0
            if self.sealed is not None:
                self.sealed.discard_failed()
            if self.staged is not None:
                # If it were left open, it would write the end of the table to a closed file.
                with suppress(Exception):
                    self.parquet.close()
                self.staged.discard()
                self.staged = self.parquet = None

    def _publish(self) -> None:
        staged = self._finish()
        if staged is not None:
            staged.publish()
            self.staged = None

    def _begin(self, items: Sequence[Any]) -> Rows:
        step, schema = self.staging.place.step, self.sink.schema
        if schema is not None:
            return Rows(step, schema, "the schema that was given")
        path = self.staging.step / _SCHEMA_FILE
        with self.staging.writing(path):
            data = _read(path)
            if data is None:
                data = _write(path, inferred(step, items).serialize().to_pybytes())
        return Rows(step, _deserialized(step, path, data), f"the first items ({path})")

    def _size(self) -> int:
        return 0 if self.staged is None else self.staged.file.tell()

    def _write_group(self) -> None:
        import pyarrow
        import pyarrow.parquet

        assert self.rows is not None
        if self.staged is None:
            self.staged = self.staging.create()
            with self.staged.writing():
                self.parquet = pyarrow.parquet.ParquetWriter(
                    self.staged.file, self.rows.schema, compression="zstd"
                )
        table = pyarrow.Table.from_batches(self.batches, self.rows.schema)
        with self.staged.writing():
            self.parquet.write_table(table, row_group_size=len(table))
        self.batches, self.waiting = [], 0

    def _finish(self) -> StagedFile | None:
        """Write what is left; return the file, or None if there is none."""
        if self.batches:
            self._write_group()
        if self.staged is not None and self.parquet is not None:
            with self.staged.writing():
                self.parquet.close()
            self.parquet = None
        return self.staged


class Rows:
    """Encodes items as record batches, and refuses items that do not fit the schema."""

    def __init__(self, step: str, schema: Any, origin: str) -> None:
        self.step = step
        self.schema = schema
        self.origin = origin
        self.names = frozenset(schema.names)

    def encode(self, items: Sequence[Any]) -> Any:
        """Return the items as a record batch; raise `ConnectorError` if one does not fit."""
        import pyarrow

        rows = as_rows(self.step, items, self.schema.names)
        if not all(map(self.names.issuperset, rows)):
            self._unknown_column(items, rows)
        columns = [
            self.column(field, [row.get(field.name) for row in rows], items)
            for field in self.schema
        ]
        return pyarrow.RecordBatch.from_arrays(columns, schema=self.schema)

    def column(self, field: Any, values: list[Any], items: Sequence[Any]) -> Any:
        """Return the values of a column as an array; the error for a bad value names its item."""
        import pyarrow

        array, problem = None, "null in a column that is not nullable"
        try:
            array = _array(values, field.type)
            fits = field.nullable or not array.null_count
        except (ValueError, TypeError, ArithmeticError, pyarrow.ArrowException):
            fits = False
        if fits:
            return array
        for value, item in zip(values, items, strict=True):  # find the item that does not fit
            try:
                alone = _array([value], field.type)
            except (ValueError, TypeError, ArithmeticError, pyarrow.ArrowException) as error:
                problem = f"{shorten(value)} is not {field.type}: {error}"
            else:
                if field.nullable or not alone.null_count:
                    continue
            raise self._error(item, field.name, problem)
        raise self._error(items[0], field.name, f"{problem} (in a batch of {len(items)})")

    def _unknown_column(self, items: Sequence[Any], rows: Iterable[Mapping[Any, Any]]) -> None:
        for item, row in zip(items, rows, strict=True):
            for name in row:
                if name not in self.names:
                    has = ", ".join(self.schema.names)
                    raise self._error(item, name, f"there is no such column, only {has}")

    def _error(self, item: Any, column: Any, problem: str) -> ConnectorError:
        return ConnectorError(
            f"sink {self.step!r} cannot write the {type(item).__name__} {shorten(item)}: column {column!r}: {problem}. "
            f"Columns and types are those of {self.origin}: give Parquet a schema all items fit, or .map() them before"
        )


def inferred(step: str, items: Sequence[Any]) -> Any:
    """Return the schema of these items.

    >>> inferred("out", [{"n": 1, "who": None}, {"n": 2.5, "who": "ada", "tags": ["a"]}])
    n: double
    who: string
    tags: list<item: string>
      child 0, item: string
    """
    import pyarrow

    rows = as_rows(step, items, None)
    names = dict.fromkeys(name for row in rows for name in row)
    fields = []
    for name in names:
        if not isinstance(name, str):
            raise ConnectorError(f"sink {step!r}: {name!r} cannot be the name of a column")
        values = [row.get(name) for row in rows]
        try:
            try:
                kind = pyarrow.array(values).type
            except (ValueError, TypeError, ArithmeticError, pyarrow.ArrowException):
                kind = pyarrow.array([_plain(value) for value in values]).type
        except (ValueError, TypeError, ArithmeticError, pyarrow.ArrowException) as error:
            raise ConnectorError(
                f"sink {step!r}: no type holds the values of column {name!r} in {shorten(list(items))}: {error}; "
                "give Parquet a schema all items fit, or .map() them before"
            ) from error
        if not _is_typed(kind):
            raise ConnectorError(
                f"sink {step!r}: the type of column {name!r} cannot be told from the first items, which are "
                f"{shorten(list(items))}: give Parquet a schema"
            )
        fields.append((name, kind))
    if not fields:
        raise ConnectorError(f"sink {step!r}: {shorten(items[0])} has no columns")
    return pyarrow.schema(fields)


def as_rows(
    step: str, items: Sequence[Any], names: Sequence[str] | None
) -> Sequence[Mapping[Any, Any]]:
    """Return the items as dictionaries; `names` are the columns of plain tuples."""
    if set(map(type, items)) == {dict}:
        return items
    rows = []
    for item in items:
        if isinstance(item, Mapping):
            rows.append(item)
        elif isinstance(item, DeadLetter):
            rows.append(_dead_letter_row(item))
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            rows.append({f.name: getattr(item, f.name) for f in dataclasses.fields(item)})
        elif isinstance(item, tuple):
            columns = getattr(item, "_fields", names)
            if columns is None:
                raise ConnectorError(
                    f"sink {step!r}: the columns of the tuple {shorten(item)} have no names: give Parquet a schema"
                )
            if len(columns) != len(item):
                raise ConnectorError(
                    f"sink {step!r} cannot write the tuple {shorten(item)}: it has {len(item)} values "
                    f"for the {len(columns)} columns {', '.join(columns)}"
                )
            rows.append(dict(zip(columns, item, strict=True)))
        else:
            raise ConnectorError(
                f"sink {step!r} cannot write the {type(item).__name__} {shorten(item)}: a row is a dictionary, "
                "a dataclass or a tuple; .map() it to one before the sink"
            )
    return rows


def _dead_letter_row(letter: DeadLetter) -> dict[str, Any]:
    """Return a row for a dead letter, whatever its key and record are: as JSON, or as Python shows them."""
    row = {f.name: getattr(letter, f.name) for f in dataclasses.fields(letter)}
    for name in ("key", "record"):
        try:
            row[name] = as_json(row[name])
        except Exception:
            row[name] = shorten(row[name])
    return row


# ---------------------------------------------------------------- values and types


def _array(values: list[Any], kind: Any) -> Any:
    """Return the values as an Arrow array; raise an error if the array does not hold exactly these values."""
    import pyarrow

    try:
        array = pyarrow.array(values, kind)
    except (ValueError, TypeError, ArithmeticError, pyarrow.ArrowException):
        values = [_plain(value) for value in values]
        array = pyarrow.array(values, kind)
    if _may_change(values, kind):
        for value, stored in zip(values, array.to_pylist(), strict=True):
            _compare(value, stored)
    return array


def _plain(value: Any) -> Any:
    """Return the value with dataclasses as dictionaries."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def _may_change(values: list[Any], kind: Any) -> bool:
    """Return whether Arrow may have kept less than it got: half a number, some fields, a date without its time."""
    from pyarrow import types

    if types.is_integer(kind):
        return not set(map(type, values)) <= {int, type(None)}
    return bool(types.is_nested(kind) or types.is_temporal(kind))


def _compare(value: Any, stored: Any) -> None:
    """Raise `ValueError` if the stored value lacks a part of a value."""
    if isinstance(value, Mapping):
        pairs = stored if isinstance(stored, Mapping) else dict(stored)
        for name, inner in value.items():
            if name not in pairs:
                raise ValueError(f"it has no field {name!r}")
            _compare(inner, pairs[name])
    elif isinstance(stored, list) and isinstance(value, list | tuple | set | frozenset):
        for inner, returned in zip(value, stored, strict=True):
            _compare(inner, returned)
    elif _comparable(value, stored) and value != stored:
        raise ValueError(f"{value!r} would become {stored!r}")


def _comparable(value: Any, stored: Any) -> bool:
    """Return whether a difference of two values is a loss, and not only another notation of the same value."""
    return isinstance(value, date | dt_time | timedelta) or (
        isinstance(stored, int) and isinstance(value, Number)
    )


def _is_typed(kind: Any) -> bool:
    """Return whether a type can be written: no part of it is the type of nulls only."""
    from pyarrow import types

    if types.is_nested(kind):
        inner = [kind.field(at).type for at in range(kind.num_fields)]
        return bool(inner) and all(map(_is_typed, inner))
    return not types.is_null(kind)


# ---------------------------------------------------------------- the schema all workers share


def _schema(sink: str, schema: Any) -> Any:
    import pyarrow

    try:
        parsed = schema if isinstance(schema, pyarrow.Schema) else pyarrow.schema(schema)
    except (ValueError, TypeError, pyarrow.ArrowException) as error:
        raise ConnectorError(f"{sink}: {schema!r} is not a schema of pyarrow: {error}") from error
    if not parsed.names or len(set(parsed.names)) < len(parsed.names):
        raise ConnectorError(f"{sink}: a schema needs columns, each with a name of its own")
    return parsed


def _deserialized(step: str, path: Path, data: bytes) -> Any:
    import pyarrow

    try:
        return pyarrow.ipc.read_schema(pyarrow.py_buffer(data))
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        raise ConnectorError(
            f"sink {step!r}: the schema in {path} is damaged ({error}): delete it, or give Parquet a schema"
        ) from error


def _read(path: Path) -> bytes | None:
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _write(path: Path, data: bytes) -> bytes:
    """Write a file that does not exist yet; if another worker was faster, return what it wrote."""
    draft = path.with_name(f"{path.name}-{os.getpid()}-{time.monotonic_ns()}")
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return path.read_bytes()
        except OSError:  # some file systems have no links; then the last worker wins
            os.rename(draft, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)
    return data
