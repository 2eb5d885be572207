"""Tables: what comes out is what went in, of the same types; and others can read it without us."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import io
import json
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railgun.engine.snapshots.errors import (
    DamagedError,
    DecodingError,
    EncodingError,
    FormatError,
    SnapshotError,
)
from railgun.engine.snapshots.table import Rows, TableWriter, read_rows
from railgun.hashing import Hashes, hash_keys

FIXTURES = Path(__file__).parent / "data"


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.StrEnum):
    ON = "on"


@dataclasses.dataclass
class Account:
    owner: str
    amounts: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Place:
    x: int
    y: int


class Pair(NamedTuple):
    a: Any
    b: Any


class Odd(dict[str, int]):
    pass


def table(keys: list[Any], states: list[Any], **columns: Any) -> bytes:
    writer = TableWriter("step", 1)
    writer.add(hashes_of(keys), keys, states, **columns)
    return writer.finish()


def hashes_of(keys: list[Any]) -> Hashes:
    return np.arange(len(keys), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def same(one: Any, other: Any) -> bool:
    """Equal and of the same types all through; NaN is NaN, and -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, collections.deque | set | frozenset):
        return same(sorted(one, key=repr), sorted(other, key=repr))
    if dataclasses.is_dataclass(one):
        return same(vars(one), vars(other))
    return bool(one == other)


def check(keys: list[Any], states: list[Any]) -> Rows:
    rows = read_rows(table(keys, states))
    assert same(rows.keys, keys), (rows.keys, keys)
    assert same(rows.states, states), (rows.states, states)
    assert rows.hashes.tolist() == hashes_of(keys).tolist()
    return rows


# ------------------------------------------------------------ round trips

surrogates = st.characters(categories=["Cs"])
texts = st.text(
    st.one_of(st.characters(), surrogates, st.sampled_from('\0\x7f\n"\\é€𝄞\ud83d\ude00'))
)
scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.binary()),
    st.integers(-(2**70), 2**70),
    st.integers(4298, 4302).map(lambda digits: -(10**digits)),  # Python writes 4300
    st.sampled_from([-0.0, 2**63, -(2**63), 2**63 - 1, 10**400, "\x7f", "a\x7fb"]),
    st.sampled_from([Color.RED, Level.LOW, Mode.ON, np.float64(1.5), np.int64(3), np.bool_(True)]),
    st.builds(datetime.datetime.fromtimestamp, st.integers(0, 10**9)),
    st.decimals(allow_nan=False),
)
states = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(st.one_of(st.integers(), texts, st.none()), inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Account, texts, st.lists(st.floats())),
        st.builds(lambda d: collections.defaultdict(list, d), st.dictionaries(texts, inner)),
        st.builds(collections.OrderedDict, st.dictionaries(texts, inner)),
        st.builds(collections.deque, st.lists(st.integers())),
        st.sets(st.integers()),
    ),
    max_leaves=8,
)
keys = st.one_of(
    *(st.integers(), texts, st.binary(), st.none(), st.booleans(), st.floats(allow_nan=False)),
    st.tuples(texts, st.integers()),
    st.tuples(st.tuples(st.binary(), st.none()), st.sampled_from(Color)),
    st.builds(Place, st.integers(), st.integers()),
    st.sampled_from([Color.BLUE, Level.LOW, Mode.ON, np.str_("x"), np.int32(3)]),
    st.frozensets(st.integers()),
)


@given(st.lists(st.tuples(keys, states), max_size=30))
def test_any_rows_come_back_as_they_were(rows: list[tuple[Any, Any]]) -> None:
    check([key for key, _ in rows], [state for _, state in rows])


@given(st.lists(st.one_of(st.integers(), st.booleans()), max_size=200))
def test_numbers_come_back_as_they_were(values: list[Any]) -> None:
    check(values, values)


@given(st.lists(texts, min_size=1, max_size=100))
def test_text_comes_back_as_it_was(values: list[str]) -> None:
    check(values, values)


@given(st.lists(st.dictionaries(texts, st.one_of(st.integers(), st.floats(), texts)), max_size=80))
def test_flat_dicts_come_back_as_they_were(values: list[Any]) -> None:
    check(list(range(len(values))), values)


MANY: dict[str, Callable[[int], Any]] = {
    "int": lambda n: n * 7,
    "long int among int": lambda n: 2**64 if n == 99 else n,
    "bool": lambda n: n % 2 == 0,
    "bool among int": lambda n: True if n == 99 else n,
    "float": lambda n: n / 7,
    "nan among float": lambda n: math.nan if n == 99 else n / 7,
    "str": lambda n: f"té{n}",
    "marks": lambda n: "\x7f" if n % 3 else '","\x7f","',
    "half a surrogate pair": lambda n: "\ud83d" if n == 99 else str(n),
    "two halves": lambda n: ["\ud83d\ude00"],
    "NUL": lambda n: f"a\0{n}",
    "None": lambda n: None,
    "list with bytes": lambda n: [n, b"x" * 100],
    "list with bytes, once": lambda n: [n, b"x" if n == 99 else "x"],
    "list with bytes, later in some": lambda n: [b"x", n] if n % 2 else [n, b"x"],
    "lists of lengths": lambda n: [b"", 1][: n % 3],
    "dict": lambda n: {"n": n, "a": "b"},
    "dict with int keys": lambda n: {n: n},
    "dict with one int key": lambda n: {"a": 1, n if n == 99 else "b": 2},
    "dict of bytes": lambda n: {"n": b"x"} if n % 4 else {"m": 1},
    "nested": lambda n: {"n": [n, {"m": [None]}]},
    "tuple": lambda n: (n, "a"),
    "tuple in a list": lambda n: [n, (1, 2)],
    "defaultdict": lambda n: collections.defaultdict(int, a=n),
    "enum": lambda n: Color.RED,
    "enum in a list": lambda n: [Level.LOW, Mode.ON],
    "numpy": lambda n: np.float64(n),
    "array": lambda n: [1, 2] if n % 2 else (1,),
    "dataclass": lambda n: Account("ada", [n, -0.0]),
    "subclass of dict": lambda n: Odd(a=n),
    "decimal": lambda n: decimal.Decimal(n) / 7,
    "empty": lambda n: [[], {}, "", (), b""][n % 5],
    "mixed": lambda n: [n, "s", None, 1.5, (1,), [1], {"a": 1}, {1: 2}, b"b"][n % 9],
}


@pytest.mark.parametrize("make", MANY.values(), ids=MANY)
@pytest.mark.parametrize("rows", [1, 63, 200])
def test_columns_of_one_kind_come_back_as_they_were(make: Callable[[int], Any], rows: int) -> None:
    values = [make(n) for n in range(rows)]
    check(list(range(rows)), values)
    check([str(n) for n in range(rows)], values)
    hashable = [value for value in values if type(value).__hash__ is not None]
    check(hashable, hashable)


def test_what_is_one_object_in_a_state_stays_one() -> None:
    shared: list[int] = []
    cycle: list[Any] = [1]
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    rows = read_rows(table([1, 2, 3], [[shared, shared], cycle, deep]))
    one, two = rows.states[0]
    assert one is two
    assert rows.states[1][1] is rows.states[1]
    assert same(rows.states[2], deep)


def test_classes_made_inside_functions_come_along() -> None:
    class Local:
        def __init__(self, n: int) -> None:
            self.n = n

    rows = read_rows(table(["a", "b"], [Local(1), 2]))
    assert rows.states[0].n == 1
    assert rows.states[1] == 2


def test_timers_ends_and_deletions_come_back() -> None:
    data = table(
        ["a", "b", ("c", 1), "d"],
        [1, object, (3,), 4],
        timers=[[5, 6], [], [(1, "x")], []],
        ended=[False, True, False, False],
        deleted=[False, True, False, True],
    )
    rows = read_rows(data)
    assert rows.states == [1, None, (3,), None]
    assert rows.timers == [[5, 6], [], [(1, "x")], []]
    assert rows.ended == [False, True, False, False]
    assert rows.deleted == [False, True, False, True]
    assert (rows.step, rows.version, len(rows)) == ("step", 1, 4)


def test_the_state_of_a_deleted_key_is_not_looked_at() -> None:
    many = 200
    rows = read_rows(table(list(range(many)), [threading.Lock()] * many, deleted=[True] * many))
    assert rows.states == [None] * many
    rows = read_rows(
        table(list(range(many)), list(range(many)), deleted=[n == 7 for n in range(many)])
    )
    assert rows.states == [None if n == 7 else n for n in range(many)]


def test_a_state_of_none_is_no_deleted_key() -> None:
    rows = read_rows(table(["a"], [None]))
    assert (rows.states, rows.deleted) == ([None], [False])


def test_numbers_are_read_however_long_python_likes_them() -> None:
    states = [10**6000 + 7, [-(10**9000) - 13, "1" * 9000], 5]
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        data = table([1, 2, 3], states)
    finally:
        sys.set_int_max_str_digits(limit)
    assert read_rows(data).states == states


def test_a_table_without_rows_is_a_table() -> None:
    writer = TableWriter("step", 7)
    writer.add(np.empty(0, np.uint64), [], [])
    rows = read_rows(writer.finish(), lambda hashes: hashes > 0)
    assert (rows.keys, rows.version, rows.hashes.tolist()) == ([], 7, [])


def test_rows_added_one_by_one_and_in_thousands_come_in_their_order() -> None:
    writer = TableWriter("step", 1)
    values: list[Any] = [n if n % 10 else (n, b"x") for n in range(40_000)]
    names: list[Any] = [str(n) if n % 100 else n for n in range(40_000)]
    at = 0
    for piece in [1] * 100 + [1000] * 3 + [1, 2, 3, 63, 64, 65, 17_000] + [1] * 50 + [40_000]:
        part = slice(at, at + piece)
        added = len(names[part])
        writer.add(np.arange(at, at + added, dtype=np.uint64), names[part], values[part])
        at += added
    assert writer.rows == 40_000
    assert writer.size > 40_000 * 8
    rows = read_rows(writer.finish())
    assert rows.keys == names
    assert rows.states == values
    assert rows.hashes.tolist() == list(range(40_000))


def test_states_are_encoded_at_once() -> None:
    writer = TableWriter("step", 1)
    states: list[Any] = [[1], {"a": 1}, {1: [2]}, [b"x"], Account("ada")]
    keys, timers = [1, 2, 3, 4, 5], [[7], [], [], [], []]
    hashes = hashes_of(keys)
    expected = copy.deepcopy(states)
    writer.add(hashes, keys, states, timers)
    states[0].append(2)
    states[1]["b"] = 2
    states[2][1].append(3)
    states[3].clear()
    states[4].owner = "grace"
    timers[0].append(8)
    hashes[:] = 0
    keys.clear()
    rows = read_rows(writer.finish())
    assert same(rows.states, expected)
    assert rows.keys == [1, 2, 3, 4, 5]
    assert rows.timers[0] == [7]
    assert rows.hashes.tolist() == hashes_of([1, 2, 3, 4, 5]).tolist()


# ------------------------------------------------------------ what is mine


class Bomb:
    """Must not be unpickled after it is armed; before, whoever saves tries whether it can be."""

    armed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (explode, ())


def explode() -> None:
    if Bomb.armed:
        raise AssertionError("unpickled, though it belongs to another worker")


@pytest.mark.parametrize("count", [10, 1000])
def test_only_what_is_mine_is_unpickled(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [("key", n) for n in range(count)]
    states: list[Any] = [n if n % 2 else Bomb() for n in range(count)]
    hashes = np.arange(count, dtype=np.uint64) + np.uint64(2**63)
    writer = TableWriter("step", 1)
    writer.add(hashes, keys, states, timers=[[n] if n % 2 else [Bomb()] for n in range(count)])
    data = writer.finish()
    monkeypatch.setattr(Bomb, "armed", True)
    seen: list[Hashes] = []

    def mine(hashes: Hashes) -> Any:
        seen.append(hashes)
        return hashes % np.uint64(2) == 1

    rows = read_rows(data, mine)
    assert rows.states == list(range(1, count, 2))
    assert rows.keys == keys[1::2]
    assert rows.timers == [[n] for n in range(1, count, 2)]
    assert rows.hashes.tolist() == hashes[1::2].tolist()
    assert seen[0].dtype == np.uint64
    assert seen[0].tolist() == hashes.tolist()
    assert len(read_rows(data, lambda hashes: np.zeros(len(hashes), np.bool_))) == 0
    with pytest.raises(DecodingError, match="belongs to another worker"):
        read_rows(data)


@pytest.mark.parametrize("checked", [False, True])
def test_groups_of_rows_that_are_not_mine_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    monkeypatch.setattr("railgun.engine.snapshots.table._GROUP_ROWS", 10)
    hashes = np.arange(35, dtype=np.uint64)
    writer = TableWriter("step", 1)
    writer.add(hashes, list(range(35)), [[n] for n in range(35)], deleted=[False] * 35)
    data = writer.finish()
    for wanted in ([], [0], [34], [9, 10], [12, 31, 32], list(range(20, 30)), list(range(35))):
        mine = np.isin(hashes, wanted)
        rows = read_rows(data, lambda found, mine=mine: mine, checked=checked)  # type: ignore[misc]
        assert rows.keys == wanted
        assert rows.states == [[n] for n in wanted]
        assert rows.hashes.tolist() == wanted
        assert rows.timers == [[] for _ in wanted]
        assert rows.deleted == [False] * len(wanted)


# ------------------------------------------------------------ for others


def test_pandas_reads_json_and_names_without_our_code() -> None:
    names: list[Any] = ["ada", 7, ("x", 1), b"raw", None, "half \ud83d", Place(1, 2)]
    values: list[Any] = [{"n": 1, "l": [1.5, None, True]}, 5, "té", (1, 2), None, [], {"a": {}}]
    frame = pd.read_parquet(io.BytesIO(table(names, values)))
    assert list(frame["key"]) == [
        *("ada", "7", '["x",1]', "b'raw'", "null", "half \\ud83d", "Place(x=1, y=2)")
    ]
    read = [None if text is None else json.loads(text) for text in frame["state"]]
    assert read == [values[0], 5, "té", None, None, [], {"a": {}}]
    assert frame["state"][3] is None
    assert frame["state"][4] == "null"
    assert pickle.loads(frame["state_pickle"][3]) == (1, 2)
    assert list(frame["key_pickle"].isna()) == [True, *[False] * 6]
    assert list(frame["version"]) == [1] * 7


@given(st.lists(st.tuples(keys, states), min_size=1, max_size=20))
def test_json_read_by_arrow_alone_is_the_state(rows: list[tuple[Any, Any]]) -> None:
    found = pq.read_table(io.BytesIO(table([k for k, _ in rows], [s for _, s in rows])))
    for (key, state), row in zip(rows, found.to_pylist(), strict=True):
        assert (row["state"] is None) != (row["state_pickle"] is None)
        if row["state"] is not None:
            assert same(json.loads(row["state"]), state)
        if row["key_pickle"] is None:
            assert same(row["key"], key)
        else:
            assert same(pickle.loads(row["key_pickle"]), key)


def test_the_columns_are_those_that_are_promised() -> None:
    found = pq.read_table(io.BytesIO(table(list(range(100)), list(range(100)))))
    assert {field.name: str(field.type) for field in found.schema} == {
        "hash": "int64",
        "key": "string",
        "key_pickle": "binary",
        "state": "string",
        "state_pickle": "binary",
        "timers": "binary",
        "ended": "bool",
        "deleted": "bool",
        "version": "int32",
    }
    assert found["hash"].to_pylist()[1] == hashes_of([0, 1]).view(np.int64).tolist()[1] < 0
    assert found.schema.metadata[b"railgun.format"] == b"1"
    assert found.schema.metadata[b"railgun.step"] == b"step"


@pytest.mark.parametrize("form", ["str", "int", "tuple"])
def test_json_is_used_wherever_it_can_be(form: str) -> None:
    """However a column is looked at, a row is written alike."""
    plain: list[Any] = [1, "a", None, 1.5, True, [1, "x"], {"a": 1}, [[1], {"b": [2]}]]
    for filler in (0, (1,), [b"x"], {"a": 1}, "\x7f"):
        states = plain + [filler] * 100
        numbers = range(len(states))
        keys: list[Any] = [n if form == "int" else (n,) for n in numbers]
        if form == "str":
            keys = list(map(str, numbers))
        texts = pq.read_table(io.BytesIO(table(keys, states)))["state"].to_pylist()
        assert [json.loads(text) for text in texts[:8]] == plain


# ------------------------------------------------------------ what is refused


def test_a_batch_of_which_one_row_cannot_be_saved_is_not_added() -> None:
    writer = TableWriter("totals", 1)
    writer.add(hashes_of(["a"]), ["a"], [1])
    size = writer.size
    with pytest.raises(
        EncodingError, match=r"step 'totals': a lock of key \[\"k\",1\] cannot be saved: TypeError"
    ):
        writer.add(hashes_of([1, 2]), ["b", ("k", 1)], [2, threading.Lock()])
    with pytest.raises(EncodingError, match=r'a list of key "b" cannot be saved'):
        writer.add(hashes_of([1]), ["b"], [2], timers=[[threading.Lock()]])
    with pytest.raises(EncodingError, match=r"the key <unlocked _thread.lock"):
        writer.add(hashes_of([1]), [threading.Lock()], [2])
    assert (writer.rows, writer.size) == (1, size)
    assert read_rows(writer.finish()).keys == ["a"]


def test_columns_of_different_lengths_are_refused() -> None:
    writer = TableWriter("totals", 1)
    with pytest.raises(SnapshotError, match="a column of 1 values for 2 keys"):
        writer.add(hashes_of([1, 2]), [1, 2], [1])
    with pytest.raises(SnapshotError, match="a column of 3 values for 2 keys"):
        writer.add(hashes_of([1, 2]), [1, 2], [1, 2], ended=[True] * 3)
    writer.finish()
    with pytest.raises(SnapshotError, match="finished"):
        writer.add(hashes_of([1]), [1], [1])
    with pytest.raises(SnapshotError, match="finished once"):
        writer.finish()


def test_a_key_that_cannot_be_shown_can_be_saved() -> None:
    assert read_rows(table([Shy()], [1])).keys == [Shy()]


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shy)

    def __hash__(self) -> int:
        return 1


def test_a_class_that_is_gone_is_named_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["ada", "grace"], [1, Account("x")])
    monkeypatch.delattr(sys.modules[__name__], "Account")
    with pytest.raises(
        DecodingError, match=r"7\.parquet: what step 'step' saved for key \"grace\" .* 'Account'"
    ):
        read_rows(data, name="7.parquet")


DATA = table([str(n) for n in range(3000)], [{"n": n, "b": str(n) * 5} for n in range(3000)])


@pytest.mark.parametrize("size", [0, 1, 4, 100, len(DATA) // 2, len(DATA) - 1, len(DATA) - 9])
def test_a_file_cut_off_is_refused(size: int) -> None:
    with pytest.raises(DamagedError, match=r"part-1 cannot be read .* load an older snapshot"):
        read_rows(DATA[:size], name="part-1")


def test_a_flipped_bit_is_a_typed_error_or_changes_nothing() -> None:
    """Anywhere in the file. The store's checksum notices each of them; this is what the table itself does."""
    whole = read_rows(DATA)
    noticed = 0
    places = range(0, len(DATA) * 8, max(1, len(DATA) * 8 // 400))
    for bit in places:
        data = bytearray(DATA)
        data[bit // 8] ^= 1 << bit % 8
        try:
            rows = read_rows(bytes(data))
        except (DamagedError, FormatError):
            noticed += 1
        else:
            assert rows.states == whole.states
    assert noticed > len(places) * 0.9


def parquet_of(columns: dict[str, Any], metadata: dict[str, str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), file)
    return file.getvalue()


def test_other_parquet_files_are_refused() -> None:
    with pytest.raises(DamagedError, match=r"x is a Parquet file, but no table"):
        read_rows(parquet_of({"a": [1]}, {}), name="x")
    ours = {"railgun.format": "1", "railgun.step": "s", "railgun.version": "1"}
    with pytest.raises(DamagedError, match=r"x .*"):
        read_rows(parquet_of({"hash": [1]}, ours), name="x")
    with pytest.raises(FormatError, match=r"x has format 2, this Railgun reads up to 1"):
        read_rows(parquet_of({"hash": [1]}, ours | {"railgun.format": "2"}), name="x")


# ------------------------------------------------------------ the format, for ever


def fixture_rows() -> tuple[list[Any], list[Any]]:
    keys: list[Any] = ["ada", "té", "", 7, -(2**63), ("x", 1), b"raw", None, 1.5, "gone"]
    states: list[Any] = [
        *(1, {"n": [1.5, None, True, "x"]}, "text", (1, 2), b"bytes", 2**80, float("inf")),
        *(collections.defaultdict(list, a=[1]), datetime.date(2020, 2, 29), None),
    ]
    return keys, states


def test_format_1_is_read_for_ever() -> None:
    """The file was written once, and must never be written again: people have such files."""
    keys, states = fixture_rows()
    rows = read_rows((FIXTURES / "snapshot-table-1.parquet").read_bytes())
    assert same(rows.keys, keys)
    assert same(rows.states, states)
    assert rows.timers == [[10, 20], *[[]] * 9]
    assert rows.ended == [False, True, *[False] * 8]
    assert rows.deleted == [*[False] * 9, True]
    assert (rows.step, rows.version) == ("count by name", 3)
    assert rows.hashes.tolist() == hash_keys(keys).tolist()


def test_pandas_is_not_needed_to_save_and_to_load() -> None:
    """Importing it takes longer than most snapshots, and would be a pause in the first of them."""
    program = """
import sys, numpy as np
from railgun.engine.snapshots.table import TableWriter, read_rows
writer = TableWriter("x", 1)
for keys, states in ((["a"] * 99, [1] * 99), ([1, "b", (2,)], [(1,), {"a": "é"}, None])):
    writer.add(np.arange(len(keys), dtype=np.uint64), keys, states, [[1]] * len(keys),
               [True] * len(keys), [True, *[False] * (len(keys) - 1)])
assert len(read_rows(writer.finish(), lambda hashes: hashes > 0)) == 100
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
