r"""Save the state of one step on one worker as a Parquet file (*table*) that any program can read.

A table has one row for each key. The columns, for readers other than Railgun::

    hash          int64    the key's 64-bit hash (`hashing`), bit for bit: Spark has no unsigned numbers
    key           string   for people: text as it is, other keys as JSON, or else as Python shows them
    key_pickle    binary   the key; null if it is text, because then `key` is the key
    state         string   the state as JSON; null if JSON would change it
    state_pickle  binary   the state, if `state` is null
    timers        binary   pickle of a list; null if there are none
    ended         bool     the key has seen its end
    deleted       bool     the key was deleted since the last snapshot: the row has no state and no timers
    version       int32    of the state, as the user counts

Rules:

1. A row contains everything about its key. Rows can be filtered and read one by one: every worker reads all files of a
   snapshot and keeps the rows that its placement gives it, so it unpickles nothing that belongs to another worker.
2. Values are read back exactly as they were, of the same types. JSON is used only where that holds: `plain.py`.
3. `add` keeps no reference to its arguments: states are mutable and go on changing. If one row of a batch cannot be
   encoded, the whole batch is refused, and the error names the key.
4. Format 1 will always be readable. A later format is marked in `railgun.format`; this reader refuses formats that it
   does not know. Pages have checksums; a damaged file is refused as a whole.
5. The reader trusts the writer, because unpickling runs code. Whoever may write into the directory of snapshots can run
   programs as the user who loads them.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from operator import countOf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from railgun.engine.snapshots.arrays import (
    ARRAY_MIN_VALUES,
    MAX_ARRAY_BYTES,
    Column,
    bits,
    fixed,
    flags,
    hashes_of,
    ints,
    ints_of,
    pickled_ints,
    unpickled_ints,
)
from railgun.engine.snapshots.errors import (
    DamagedError,
    DecodingError,
    EncodingError,
    FormatError,
    SnapshotError,
    UnloadableError,
    UnpicklableError,
)
from railgun.engine.snapshots.plain import as_json, display_json, from_json, is_unicode
from railgun.errors import pass_interrupt
from railgun.hashing import Hashes
from railgun.lazy import LazyModule
from railgun.storage.errors import StorageError
from railgun.transport.pickling import PROTOCOL, dumps, find_unloadable, may_unpickle_later

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:  # of an extra, and slow to import: when they are needed
    pa = LazyModule("pyarrow")
    pq = LazyModule("pyarrow.parquet")


FORMAT: Final = 1

_GROUP_ROWS: Final = 1 << 17  # of a row group in the file


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a table, column by column."""

    step: str
    version: int
    hashes: Hashes
    keys: list[Any]
    states: list[Any]
    """None in rows of deleted keys."""
    timers: list[list[Any]]
    ended: list[bool]
    deleted: list[bool]

    def __len__(self) -> int:
        return len(self.keys)


class TableWriter:
    """Collects rows in memory, and makes a table of them.

    >>> from railgun.hashing import hash_keys
    >>> writer = TableWriter("totals", version=1)
    >>> state = {"n": 1}
    >>> writer.add(hash_keys(["ada", "grace"]), ["ada", "grace"], [state, (2, 3)])
    >>> state["n"] = 100  # has no effect on the table
    >>> rows = read_rows(writer.finish())
    >>> rows.keys, rows.states
    (['ada', 'grace'], [{'n': 1}, (2, 3)])
    """

    def __init__(self, step: str, version: int) -> None:
        self.step = step
        self.version = version
        self.rows = 0
        self.size = 0
        """Estimated bytes so far, before compression."""
        self._finished = False
        self._tried: set[type] = set()  # types of which one value was pickled and unpickled
        self._hashes = bytearray()
        self._key = Column(pa.string())
        self._key_pickle = Column(pa.binary())
        self._state = Column(pa.string())
        self._state_pickle = Column(pa.binary())
        self._timers = Column(pa.binary())
        self._ended = bytearray()
        self._deleted = bytearray()

    def add(
        self,
        hashes: Hashes,
        keys: list[Any],
        states: list[Any],
        timers: list[list[Any]] | None = None,
        ended: list[bool] | None = None,
        deleted: list[bool] | None = None,
    ) -> None:
        """Add rows: all of them, or none if it raises `EncodingError`. States of deleted keys are ignored."""
        count = len(keys)
        for column in (hashes, states, timers, ended, deleted):
            if column is not None and len(column) != count:
                raise SnapshotError(
                    f"step {self.step!r}: a column of {len(column)} values for {count} keys"
                )
        if self._finished:
            raise SnapshotError(f"step {self.step!r}: rows for a table that is finished")
        if not count:
            return
        key_texts, key_pickles, size = self._encode_keys(keys)
        if deleted is not None and True in deleted:
            encoded = self._encode_states_but_deleted(keys, states, deleted)
        else:
            encoded = self._encode_states(keys, states)
        texts, pickles, more = encoded
        if more > MAX_ARRAY_BYTES:
            self._refuse_large_values(keys, texts, pickles)
        times = self._encode_timers(keys, timers)
        # Nothing below this line can fail.
        self._hashes += np.ascontiguousarray(hashes, dtype=np.uint64).tobytes()
        self._key.extend(key_texts, count)
        self._key_pickle.extend(key_pickles, count)
        self._state.extend(texts, count)
        self._state_pickle.extend(pickles, count)
        self._timers.extend(times, count)
        self._ended += bytes(count) if ended is None else bytes(ended)
        self._deleted += bytes(count) if deleted is None else bytes(deleted)
        self.rows += count
        self.size += size + more + 8 * count + sum(map(len, filter(None, times or ())))

    def finish(self) -> bytes:
        """Return the content of the file. Compression takes time, mostly without holding the GIL."""
        if self._finished:
            raise SnapshotError(f"step {self.step!r}: a table is finished once")
        self._finished = True
        schema = _schema().with_metadata(
            {
                "railgun.format": str(FORMAT),
                "railgun.step": _printable(self.step),
                "railgun.version": str(self.version),
            }
        )
        try:
            columns = [
                fixed(pa.int64(), self.rows, self._hashes),
                self._key.finish(),
                self._key_pickle.finish(),
                self._state.finish(),
                self._state_pickle.finish(),
                self._timers.finish(),
                bits(self._ended),
                bits(self._deleted),
                fixed(pa.int32(), self.rows, np.full(self.rows, self.version, dtype=np.int32)),
            ]
            file = pa.BufferOutputStream()
            pq.write_table(
                pa.Table.from_arrays(columns, schema=schema),
                file,
                row_group_size=_GROUP_ROWS,
                compression="zstd",
                use_dictionary=["version"],
                write_statistics=["hash"],
                write_page_checksum=True,
            )
        except pa.ArrowException as error:
            raise EncodingError(
                f"step {self.step!r}: {self.rows} rows cannot be made a Parquet file: {error}"
            ) from error
        data: bytes = file.getvalue().to_pybytes()
        return data

    # ------------------------------------------------------------ columns

    def _encode_keys(
        self, keys: list[Any]
    ) -> tuple[list[str] | pa.Array, _Mixed | pa.Array | None, int]:
        if countOf(map(type, keys), str) == len(keys):
            joined = "".join(keys)
            if is_unicode(joined):
                return keys, None, len(joined)
        if len(keys) >= ARRAY_MIN_VALUES and countOf(map(type, keys), int) == len(keys):
            with contextlib.suppress(OverflowError):
                numbers = ints(keys)
                return numbers.cast(pa.string()), pickled_ints(numbers), 20 * len(keys)
        pickles: _Mixed = self._pickled(keys, keys)
        if countOf(map(type, keys), str):
            for at, key in enumerate(keys):
                if type(key) is str and is_unicode(key):
                    pickles[at] = None
        texts = _key_texts(keys)
        return texts, pickles, sum(map(len, texts)) + sum(map(len, filter(None, pickles)))

    def _encode_states(self, keys: list[Any], states: list[Any]) -> _States:
        if len(states) >= ARRAY_MIN_VALUES and countOf(map(type, states), int) == len(states):
            with contextlib.suppress(OverflowError):
                numbers = ints(states).cast(pa.string())
                return numbers, None, numbers.nbytes
        texts = as_json(states)
        unencoded = texts.count(None)
        if not unencoded:
            return texts, None, sum(map(len, texts))  # type: ignore[arg-type]
        pickles: _Mixed
        if unencoded == len(states):
            pickles = self._pickled(keys, states)
            return None, pickles, sum(map(len, pickles))  # type: ignore[arg-type]
        pickled_rows = [at for at, text in enumerate(texts) if text is None]
        pickles = [None] * len(states)
        pickled_states = self._pickled(
            [keys[at] for at in pickled_rows], [states[at] for at in pickled_rows]
        )
        for at, pickled in zip(pickled_rows, pickled_states, strict=True):
            pickles[at] = pickled
        return texts, pickles, sum(map(len, chain(filter(None, texts), filter(None, pickles))))

    def _encode_states_but_deleted(
        self, keys: list[Any], states: list[Any], deleted: list[bool]
    ) -> _States:
        kept_rows = [at for at, is_deleted in enumerate(deleted) if not is_deleted]
        texts: list[str | None] = [None] * len(keys)
        pickles: _Mixed = [None] * len(keys)
        kept_texts, kept_pickles, size = self._encode_states(
            [keys[at] for at in kept_rows], [states[at] for at in kept_rows]
        )
        if kept_texts is not None:
            listed = kept_texts.to_pylist() if isinstance(kept_texts, pa.Array) else kept_texts
            for at, text in zip(kept_rows, listed, strict=True):
                texts[at] = text
        if kept_pickles is not None:
            for at, pickled in zip(kept_rows, kept_pickles, strict=True):
                pickles[at] = pickled
        return texts, pickles, size

    def _encode_timers(self, keys: list[Any], timers: list[list[Any]] | None) -> _Mixed | None:
        if timers is None or not any(timers):
            return None
        rows_with_timers = [at for at, key_timers in enumerate(timers) if key_timers]
        pickles: _Mixed = [None] * len(keys)
        encoded = self._pickled(
            [keys[at] for at in rows_with_timers], [list(timers[at]) for at in rows_with_timers]
        )
        for at, pickled in zip(rows_with_timers, encoded, strict=True):
            pickles[at] = pickled
        return pickles

    def _refuse_large_values(self, keys: list[Any], *columns: list[Any] | pa.Array | None) -> None:
        for column in columns:
            for key, value in zip(keys, column or (), strict=False):
                if isinstance(value, str | bytes) and len(value) > MAX_ARRAY_BYTES // 4:
                    # A character has up to 4 bytes.
                    raise EncodingError(
                        f"step {self.step!r}: the state of key {_short(key)} has {len(value)} bytes, and at most "
                        f"{MAX_ARRAY_BYTES // 4} can be saved. Spread it over more keys."
                    )

    def _pickled(self, keys: list[Any], values: list[Any]) -> list[Any]:
        """Return the pickle of each value, if necessary with the value's class in it.

        Raises `UnpicklableError` for a value that cannot be pickled, or not be unpickled again.
        """
        try:
            pickles: list[Any] = list(map(pickle.dumps, values, repeat(PROTOCOL)))
        except BaseException as error:
            pass_interrupt(error)
            pickles = []
        if len(pickles) < len(values):
            self._pickle_with_classes(keys, values, pickles)
        self._check_loads(keys, values)
        return pickles

    def _pickle_with_classes(self, keys: list[Any], values: list[Any], pickles: list[Any]) -> None:
        pickles.clear()
        try:
            pickles.extend(map(dumps, values))
            if len(pickles) < len(values):
                raise StopIteration("raised by the value itself")
        except BaseException as error:
            pass_interrupt(error)
            description = _describe(keys, values, len(pickles))
            raise UnpicklableError(
                f"step {self.step!r}: {description} cannot be saved: {type(error).__name__}: {error}. "
                "State must be made of what pickle takes: no open files, locks or connections."
            ) from error

    def _check_loads(self, keys: list[Any], values: list[Any]) -> None:
        """Refuse values that can be pickled but not unpickled. One value of each type is tried for each table."""
        failure = find_unloadable(values, self._tried)
        if failure is not None:
            at, error = failure
            raise UnpicklableError(
                f"step {self.step!r}: {_describe(keys, values, at)} can be pickled, but cannot be unpickled: "
                f"{type(error).__name__}: {error}. A class says by __reduce__ or __getstate__ how it is made again."
            ) from error


def _describe(keys: list[Any], values: list[Any], at: int) -> str:
    """Return a phrase that names a value of a key, or the key itself."""
    key, value = keys[at], values[at]
    owner = "the key" if key is value else f"a {type(value).__name__} of key"
    return f"{owner} {_short(key)}"


_Mixed = list[bytes | None]
_States: TypeAlias = "tuple[list[Any] | pa.Array | None, _Mixed | None, int]"
"""The columns `state` and `state_pickle`, None if there is nothing in one, and their bytes."""


@cache
def _schema() -> pa.Schema:
    """Return the columns of every table."""
    return pa.schema(
        [
            pa.field("hash", pa.int64(), nullable=False),
            pa.field("key", pa.string(), nullable=False),
            pa.field("key_pickle", pa.binary()),
            pa.field("state", pa.string()),
            pa.field("state_pickle", pa.binary()),
            pa.field("timers", pa.binary()),
            pa.field("ended", pa.bool_(), nullable=False),
            pa.field("deleted", pa.bool_(), nullable=False),
            pa.field("version", pa.int32(), nullable=False),
        ]
    )


def _key_texts(keys: list[Any]) -> list[str]:
    """Return keys as text for people."""
    return [_printable(key) if type(key) is str else _display(key) for key in keys]


def _display(key: Any) -> str:
    try:
        if not isinstance(key, bytes):
            text = display_json(key)
            if text is not None:
                return text
        return _printable(repr(key))
    except BaseException as error:
        pass_interrupt(error)
        return f"<{type(key).__qualname__}>"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _short(key: Any) -> str:
    text = _display(key)
    return text if len(text) <= 80 else text[:77] + "..."


# ------------------------------------------------------------ reading


Calling = Callable[[Sequence[Any], Callable[[], int]], contextlib.AbstractContextManager[Any]]
"""Makes the context in which values of keys are unpickled, given the keys and a function that counts those done."""
_UNPICKLE_BATCH: Final = 10_000  # values unpickled by one call


def read_rows(
    data: bytes,
    mine: Callable[[Hashes], NDArray[np.bool_]] | None = None,
    name: str = "a table of a snapshot",
    *,
    checked: bool = False,
    calling: Calling = lambda keys, done: contextlib.nullcontext(),
) -> Rows:
    """Return the rows of a table, unpickling only those that are `mine`. `name` is for errors.

    `mine`: a function that marks the rows to read by their hashes. `checked`: the file as a whole was compared with its
    checksum, so the checksums of its pages, which take as long as all the rest, are skipped. `calling` makes the
    context in which values are unpickled, which may run user code.

    Raises `DamagedError` if the file is damaged, `FormatError` if it is of a later format, and `DecodingError` if a key
    or state cannot be decoded, for example because its class no longer exists.
    """
    step, version, file = open_table(pa.BufferReader(data), name, checked=checked)
    hashes, table = _filtered(file, mine, name)
    with no_collection():
        keys = _decoded(table["key"], table["key_pickle"], _as_they_are, name, step, calling)
        pickles = table["state_pickle"]
        states = _decoded(table["state"], pickles, _from_json, name, step, calling, keys)
        timers = _timers(table["timers"], name, step, calling, keys)
    ended, deleted = flags(table["ended"]), flags(table["deleted"])
    return Rows(step, version, hashes, keys, states, timers, ended, deleted)


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise any unexpected error of this block as a `DamagedError` that names the file."""
    try:
        yield
    except (SnapshotError, StorageError):
        raise
    except Exception as error:
        raise DamagedError(
            f"{name} cannot be read as a Parquet file, so it is not what was written: {error}. "
            "Bring it back from a copy, or load an older snapshot."
        ) from error


def open_table(
    source: pa.NativeFile, name: str, *, checked: bool = False
) -> tuple[str, int, pq.ParquetFile]:
    """Return the step, the version of state, and the open file, to be read in part.

    Read it inside of `reading`, which turns errors into `DamagedError`.
    """
    with reading(name):
        return _open(source, name, checked)


def _open(source: pa.NativeFile, name: str, checked: bool) -> tuple[str, int, pq.ParquetFile]:
    file = pq.ParquetFile(source, page_checksum_verification=not checked)
    metadata = file.metadata.metadata or {}
    if b"railgun.format" not in metadata:
        raise DamagedError(
            f"{name} is a Parquet file, but no table of a snapshot: it has no railgun.format"
        )
    if int(metadata[b"railgun.format"]) > FORMAT:
        raise FormatError(
            f"{name} has format {int(metadata[b'railgun.format'])}, this Railgun reads up to {FORMAT}: "
            "load it with the version that wrote it, or a newer one."
        )
    fields = {field.name: field for field in file.schema_arrow}
    if [fields.get(field.name) for field in _schema()] != list(_schema()):
        raise DamagedError(f"{name} has not the columns of a table of a snapshot")
    return metadata[b"railgun.step"].decode(), int(metadata[b"railgun.version"]), file


def _filtered(
    file: pq.ParquetFile, mine: Callable[[Hashes], NDArray[np.bool_]] | None, name: str
) -> tuple[Hashes, pa.Table]:
    """Return the rows that are `mine`, with their hashes. Row groups without any are not read beyond the hashes."""
    wanted = None
    groups = list(range(file.num_row_groups))
    if mine is not None:
        with reading(name):
            hashes = hashes_of(file.read(columns=["hash"], use_threads=False)["hash"])
        wanted = np.asarray(mine(hashes), dtype=np.bool_)
        ends = np.cumsum([file.metadata.row_group(group).num_rows for group in groups], dtype=int)
        by_group = np.split(wanted, ends[:-1]) if groups else []
        groups = [group for group in groups if by_group[group].any()]
        wanted = np.concatenate([by_group[group] for group in groups] or [wanted[:0]])
    with reading(name):
        table = file.read_row_groups(groups, columns=_schema().names, use_threads=False)
        hashes = hashes_of(table["hash"])
    if wanted is not None and not wanted.all():
        return hashes[wanted], table.filter(bits(wanted))
    return hashes, table


def _decoded(
    texts: pa.ChunkedArray,
    pickles: pa.ChunkedArray,
    decode: Callable[[list[str], str], list[Any]],
    name: str,
    step: str,
    calling: Calling,
    keys: list[Any] | None = None,
) -> list[Any]:
    """Return values that are text in some rows, a pickle in others, and neither (None) in rows of deleted keys."""
    count = len(pickles)
    numbers: list[Any] | None
    if pickles.null_count == count and texts.null_count == 0:
        numbers = None if keys is None else ints_of(texts)
        return decode(texts.to_pylist(), name) if numbers is None else numbers
    if pickles.null_count == 0:
        numbers = unpickled_ints(pickles)
        if numbers is not None:
            return numbers
        owners = texts.to_pylist() if keys is None else keys
        return _unpickled(pickles.to_pylist(), name, step, calling, owners)
    values: list[Any] = [None] * count
    text_list, pickle_list = texts.to_pylist(), pickles.to_pylist()
    at_pickles = [at for at, pickled in enumerate(pickle_list) if pickled is not None]
    at_texts = [
        at for at, text in enumerate(text_list) if text is not None and pickle_list[at] is None
    ]
    decoded = decode([text_list[at] for at in at_texts], name)
    for at, value in zip(at_texts, decoded, strict=True):
        values[at] = value
    owners = text_list if keys is None else keys
    unpickled = _unpickled(
        *([pickle_list[at] for at in at_pickles], name, step, calling),
        [owners[at] for at in at_pickles],
    )
    for at, value in zip(at_pickles, unpickled, strict=True):
        values[at] = value
    return values


def _as_they_are(texts: list[str], name: str) -> list[Any]:
    return texts


def _from_json(texts: list[str], name: str) -> list[Any]:
    try:
        return from_json(texts)
    except (ValueError, RecursionError) as error:
        raise DamagedError(
            f"{name} is damaged: a state is no JSON: {error}. "
            "Bring it back from a copy, or load an older snapshot."
        ) from error


def _unpickled(
    pickles: list[bytes], name: str, step: str, calling: Calling, keys: Sequence[Any]
) -> list[Any]:
    values: list[Any] = []
    with calling(keys, values.__len__):
        try:
            for at in range(0, len(pickles), _UNPICKLE_BATCH):
                _unpickle_batch(pickles[at : at + _UNPICKLE_BATCH], values)
        except BaseException as error:
            pass_interrupt(error)
            kind = DecodingError if may_unpickle_later(error) else UnloadableError
            raise kind(
                f"{name}: what step {step!r} saved for key {_short(keys[len(values)])} cannot be unpickled: "
                f"{type(error).__name__}: {error}. Its class must be found under the name it had when it was saved."
            ) from error
    return values


def _unpickle_batch(pickles: list[bytes], values: list[Any]) -> None:
    """Append the unpickled values to `values`. Batches are small, so that the liveness check sees progress."""
    count_before = len(values)
    values.extend(map(pickle.loads, pickles))
    if len(values) - count_before < len(pickles):
        raise StopIteration("raised by the value itself")


def _timers(
    column: pa.ChunkedArray, name: str, step: str, calling: Calling, keys: list[Any]
) -> list[list[Any]]:
    timers: list[list[Any]] = [[]] * len(column)  # one shared list: most keys never have timers
    if column.null_count < len(column):
        listed = column.to_pylist()
        rows_with_timers = [at for at, pickled in enumerate(listed) if pickled is not None]
        pickles = [listed[at] for at in rows_with_timers]
        unpickled = _unpickled(pickles, name, step, calling, [keys[at] for at in rows_with_timers])
        for at, key_timers in zip(rows_with_timers, unpickled, strict=True):
            timers[at] = key_timers
    return timers


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turn the garbage collector off: scanning many new objects, which all stay, would take most of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
