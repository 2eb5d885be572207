"""States as columns: what kind they are of, and Arrow arrays of them.

JSON is read by Arrow where that gives the very same, at its own speed; what it refuses is read again, row by
row, by `kinds.fit`, which knows more, or else says which key is to blame.

Pickles that name nothing but Python's own types of data are opened (`kinds.unpickle_data`). Others stay closed, and the state
is null, unless it is said that they may be opened: that runs what is in them, and needs the classes they name.
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

_FIRST: Final = 256  # rows that are looked at before Arrow is asked whether the others are alike
_LONGEST: Final = (1 << 31) - 1024
_SOURCE: Final = ("position", "finished", "reached")
SEALED: Final = object()
"""Stands for a state that is not opened."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How the states of a step are opened."""

    step: str
    is_source: bool = False
    unpickle: bool = False

    def values(self, states: States, keys: pa.Array) -> list[Any]:
        """States as plain values; `SEALED` for those that stay closed."""
        texts, pickles = states.texts.to_pylist(), states.pickles.to_pylist()
        made: list[Any] = [None] * len(texts)
        written = [row for row, text in enumerate(texts) if text is not None]
        try:
            found = from_json([texts[row] for row in written])
        except (ValueError, RecursionError) as error:
            raise DamagedError(
                f"step {self.step!r}: a state is no JSON: {error}. Read another snapshot"
            ) from error
        for row, value in zip(written, found, strict=True):
            made[row] = value
        for row, data in enumerate(pickles):
            if data is not None:
                made[row] = self._opened(data, keys, row)
        return made

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
        """Of a part of a source: how far it is read, whether to its end, and the time it has come to."""
        if not (self.is_source and type(value) is tuple and len(value) == len(_SOURCE)):
            return value
        position, finished, reached = value
        time = None
        if MIN < reached < LAST:
            with contextlib.suppress(
                OverflowError
            ):  # a clock of a user's, of which calendars know nothing
                time = kinds.as_datetime(reached)
        return dict(zip(_SOURCE, (position, finished, time), strict=True))


# ------------------------------------------------------------ looking


@dataclass(slots=True)
class Seen:
    """What the rows that were looked at have in common."""

    keys: Kind = "null"
    states: Kind = "null"
    sealed: bool = False

    def look(self, block: Block, opening: Opening) -> None:
        """Take these rows into account."""
        if self.keys != "string":
            self.keys = kinds.merged(self.keys, _kind_of_keys(block.keys, block.key_pickles))
            self.keys = "string" if self.keys == "any" else self.keys
        for states in block.states.values():
            self._look(states, block.keys, opening)

    def _look(self, states: States, keys: pa.Array, opening: Opening) -> None:
        count = len(keys)
        start = min(_FIRST, count) if self.states == "null" else 0
        for first, last in ((0, start), (start, count)):
            some = States(states.texts[first:last], states.pickles[first:last])
            if last > first and not self._is_known(some):
                for value in opening.values(some, keys[first:last]):
                    if value is SEALED:
                        self.sealed = True
                    else:
                        self.states = kinds.merged(self.states, kinds.kind_of(value))

    def _is_known(self, states: States) -> bool:
        """Whether these are of no other kind: Arrow reads no value as one of another kind, nor leaves any out."""
        if states.pickles.null_count < len(states.pickles):
            return False
        known = kinds.arrow_of(self.states)
        return known is not None and parsed(states.texts, known, strict=True) is not None

    def merge(self, other: Seen) -> None:
        """Take what another has seen into account."""
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
class Maker:
    """Makes batches of a table."""

    schema: t.StructType
    arrow: pa.Schema
    opening: Opening
    strict: bool

    def batch(self, block: Block) -> pa.RecordBatch:
        """Rows as the table has them."""
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
                raise self._blamed(key, kinds.misfit("key", key, wanted.simpleString())) from error
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
            found = parsed(states.texts, arrow, self.strict)
            if found is not None:
                return found
        fit = kinds.fit(wanted, name, self.strict)
        made: list[Any] = []
        values = self.opening.values(states, block.keys)
        try:
            made.extend(None if value is SEALED else fit(value) for value in values)
        except MisfitError as error:
            raise self._blamed(block.keys[len(made)].as_py(), error) from error
        return pa.array(made, arrow)

    def _blamed(self, key: str, error: MisfitError) -> MisfitError:
        hint = (
            'its types were guessed from a sample of the rows: option("infer", "all") looks at all of them, and so '
            "does railgun.state_table"
            if self.strict
            else "give a schema that holds it, or none"
        )
        return MisfitError(f"step {self.opening.step!r}, key {_short(key)}, {error}; {hint}")


def parsed(texts: pa.Array, wanted: pa.DataType, strict: bool) -> pa.Array | None:
    """JSON as an array of this type; None if Arrow finds a value that is of another, or, if `strict`, of none."""
    if not len(texts):
        return pa.array([], wanted)
    behaviour = "error" if strict else "ignore"
    try:
        filled = pc.fill_null(texts, "null")
        lines = pc.binary_join_element_wise(pa.scalar('{"v":'), filled, pa.scalar("}\n"), "")
        data = lines.buffers()[2]
        if data.size > _LONGEST:
            return None
        column = pj.read_json(
            pa.BufferReader(data),
            pj.ReadOptions(use_threads=False, block_size=data.size + 64),
            pj.ParseOptions(
                explicit_schema=pa.schema([pa.field("v", wanted)]),
                unexpected_field_behavior=behaviour,
            ),
        )["v"]
        found = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if len(found) != len(texts):
            return None
        return found if found.type == wanted else found.cast(wanted)
    except pa.ArrowException:
        return None


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
