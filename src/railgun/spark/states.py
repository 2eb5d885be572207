"""Turn saved states into columns: find their kind, and make Arrow arrays of them.

Arrow parses JSON, at its own speed, where its result is exactly that of `kinds.fit`. JSON that Arrow refuses is parsed
again, row by row, by `kinds.fit`, which supports more, or else names the key that does not fit.

Pickles that name only Python's own types of data are unpickled (`kinds.unpickle_data`). Other pickles stay closed
(sealed), and their state is null, unless the user allows to unpickle them: that runs their code, and needs their
classes.
"""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql import types as t

from railgun.engine.protocol.frontier import LAST, MIN
from railgun.engine.snapshots.errors import DamagedError, DecodingError
from railgun.engine.snapshots.plain import from_json
from railgun.spark import kinds
from railgun.spark.kinds import Kind, MisfitError, SealedError
from railgun.spark.saved_rows import Block, States

# Rows that are looked at before Arrow is asked whether the others are alike
_FIRST_ROWS: Final = 256
_MAX_JSON_BYTES: Final = (1 << 31) - 1024
_SOURCE_FIELDS: Final = ("position", "finished", "reached")
SEALED: Final = object()
"""Stands for a state that is not unpickled."""


@dataclass(frozen=True, slots=True)
class StateDecoder:
    """How the states of a step are unpickled."""

    step: str
    is_source: bool = False
    unpickle: bool = False

    def values(self, states: States, keys: pa.Array) -> list[Any]:
        """Return states as plain values; `SEALED` for those that are not unpickled."""
        texts, pickles = states.texts.to_pylist(), states.pickles.to_pylist()
        values: list[Any] = [None] * len(texts)
        written = [row for row, text in enumerate(texts) if text is not None]
        try:
            parsed_texts = from_json([texts[row] for row in written])
        except (ValueError, RecursionError) as error:
            raise DamagedError(
                f"step {self.step!r}: a state is not valid JSON: {error}. Read another snapshot"
            ) from error
        for row, value in zip(written, parsed_texts, strict=True):
            values[row] = value
        for row, data in enumerate(pickles):
            if data is not None:
                values[row] = self._opened(data, keys, row)
        return values

    def _opened(self, data: bytes, keys: pa.Array, row: int) -> Any:
        try:
            value = pickle.loads(data) if self.unpickle else kinds.unpickle_data(data)
            return kinds.plain(self._named(value))
        except SealedError:
            return SEALED
        except Exception as error:
            if not self.unpickle:
                return SEALED
            raise DecodingError(
                f"step {self.step!r}: the state of key {_short(keys[row].as_py())} cannot be made again: "
                f"{type(error).__name__}: {error}. Its class must be found where the table is read; without "
                "unpickle such states are null, and their pickles are in a column of their own"
            ) from error

    def _named(self, value: Any) -> Any:
        """Name the fields of a source part's state (`_SOURCE_FIELDS`); return any other state unchanged."""
        if not (self.is_source and type(value) is tuple and len(value) == len(_SOURCE_FIELDS)):
            return value
        position, finished, reached = value
        time = None
        if MIN < reached < LAST:
            # A user's own clock may count in units that no calendar knows.
            with contextlib.suppress(OverflowError):
                time = kinds.as_datetime(reached)
        return dict(zip(_SOURCE_FIELDS, (position, finished, time), strict=True))


# ------------------------------------------------------------ looking


@dataclass(slots=True)
class SeenKinds:
    """The kinds of the rows that were looked at."""

    keys: Kind = "null"
    states: Kind = "null"
    sealed: bool = False

    def look(self, block: Block, decoder: StateDecoder) -> None:
        """Merge the kinds of these rows."""
        if self.keys != "string":
            self.keys = kinds.merged(self.keys, _kind_of_keys(block.keys, block.key_pickles))
            self.keys = "string" if self.keys == "any" else self.keys
        for states in block.states.values():
            self._look(states, block.keys, decoder)

    def _look(self, states: States, keys: pa.Array, decoder: StateDecoder) -> None:
        count = len(keys)
        start = min(_FIRST_ROWS, count) if self.states == "null" else 0
        for first, last in ((0, start), (start, count)):
            part = States(states.texts[first:last], states.pickles[first:last])
            if last > first and not self._fits_kind(part):
                for value in decoder.values(part, keys[first:last]):
                    if value is SEALED:
                        self.sealed = True
                    else:
                        self.states = kinds.merged(self.states, kinds.kind_of(value))

    def _fits_kind(self, states: States) -> bool:
        """Return whether these states have the kind seen so far: Arrow neither converts values here nor drops any."""
        if states.pickles.null_count < len(states.pickles):
            return False
        kind = kinds.arrow_of(self.states)
        return kind is not None and parse_json(states.texts, kind, strict=True) is not None

    def merge(self, other: SeenKinds) -> None:
        """Merge the kinds that another instance has seen."""
        self.keys = kinds.merged(self.keys, other.keys)
        self.keys = "string" if self.keys == "any" else self.keys
        self.states = kinds.merged(self.states, other.states)
        self.sealed = self.sealed or other.sealed


def _kind_of_keys(keys: pa.Array, pickles: pa.Array) -> Kind:
    if not len(keys):
        return "null"
    if pickles.null_count or not pc.all(pc.match_substring_regex(keys, r"^-?[0-9]+$")).as_py():
        return "string"
    try:
        keys.cast(pa.int64())
    except pa.ArrowInvalid:
        return "string"
    return "long"


# ------------------------------------------------------------ making


@dataclass(frozen=True, slots=True)
class TableEncoder:
    """Makes record batches of a state table."""

    schema: t.StructType
    arrow: pa.Schema
    decoder: StateDecoder
    strict: bool

    def batch(self, block: Block) -> pa.RecordBatch:
        """Return rows as a batch with the schema of the table."""
        arrays = [
            self._column(block, field, wanted)
            for field, wanted in zip(self.schema, self.arrow.types, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)

    def _column(self, block: Block, field: t.StructField, arrow: pa.DataType) -> pa.Array:
        name = field.name
        if name in block.states:
            return self._states(block, name, field.dataType, arrow)
        if name == "key":
            return self._keys(block.keys, field.dataType, arrow)
        if name == "timers":
            return self._timers(block.timers, arrow)
        if name.endswith("_pickle"):
            return block.states[name.removesuffix("_pickle")].pickles
        column = block.columns[name]
        return column if column.type == arrow else column.cast(arrow)

    def _keys(self, keys: pa.Array, wanted: t.DataType, arrow: pa.DataType) -> pa.Array:
        try:
            return keys.cast(arrow)
        except pa.ArrowInvalid:
            pass
        for key in keys.to_pylist():
            try:
                pa.array([key]).cast(arrow)
            except pa.ArrowInvalid as error:
                raise self._error_of(
                    key, kinds.misfit("key", key, wanted.simpleString())
                ) from error
        raise AssertionError("one of them does not fit")

    def _timers(self, pickles: pa.Array | None, arrow: pa.DataType) -> pa.Array:
        assert pickles is not None
        if pickles.null_count == len(pickles):
            offsets = pa.repeat(pa.scalar(0, pa.int32()), len(pickles) + 1)
            return pa.ListArray.from_arrays(offsets, pa.array([], arrow.value_type), type=arrow)
        times = [[] if data is None else kinds.unpickle_data(data) for data in pickles.to_pylist()]
        return pa.array(times, arrow)

    def _states(self, block: Block, name: str, wanted: t.DataType, arrow: pa.DataType) -> pa.Array:
        states = block.states[name]
        if states.pickles.null_count == len(states.pickles) and kinds.reads_as_json(wanted):
            array = parse_json(states.texts, arrow, self.strict)
            if array is not None:
                return array
        fit = kinds.fit(wanted, name, self.strict)
        fitted: list[Any] = []
        values = self.decoder.values(states, block.keys)
        try:
            fitted.extend(None if value is SEALED else fit(value) for value in values)
        except MisfitError as error:
            raise self._error_of(block.keys[len(fitted)].as_py(), error) from error
        return pa.array(fitted, arrow)

    def _error_of(self, key: str, error: MisfitError) -> MisfitError:
        hint = (
            'its types were guessed from a sample of the rows: option("infer", "all") looks at all of them, and so '
            "does railgun.state_table"
            if self.strict
            else "give a schema that holds it, or none"
        )
        return MisfitError(f"step {self.decoder.step!r}, key {_short(key)}, {error}; {hint}")


def parse_json(texts: pa.Array, wanted: pa.DataType, strict: bool) -> pa.Array | None:
    """Return JSON as an array of this type; None if a value is of another type or (if `strict`) has an extra field."""
    if not len(texts):
        return pa.array([], wanted)
    behaviour = "error" if strict else "ignore"
    try:
        filled = pc.fill_null(texts, "null")
        lines = pc.binary_join_element_wise(pa.scalar('{"v":'), filled, pa.scalar("}\n"), "")
        data = lines.buffers()[2]
        if data.size > _MAX_JSON_BYTES:
            return None
        column = pj.read_json(
            pa.BufferReader(data),
            pj.ReadOptions(use_threads=False, block_size=data.size + 64),
            pj.ParseOptions(
                explicit_schema=pa.schema([pa.field("v", wanted)]),
                unexpected_field_behavior=behaviour,
            ),
        )["v"]
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if len(array) != len(texts):
            return None
        return array if array.type == wanted else array.cast(wanted)
    except pa.ArrowException:
        return None


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
