"""The hash of a key decides where its state lives, so it may never differ: not between the column
path and the single one, not between equal keys of different types, not between processes, and not
between releases.
"""

from __future__ import annotations

import datetime
import enum
import math
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from railgun.errors import KeyCodeError, KeyTypeError, RailgunError
from railgun.hashing import BYTES, INT, MASK, P1, P2, P3, STR, hash_buffer, hash_keys, key_hash

quick = settings(max_examples=100, deadline=None)

UTC = datetime.UTC
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=45))
WEST = datetime.timezone(-datetime.timedelta(hours=8))


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Unit(enum.StrEnum):
    METRE = "m"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    name: str
    number: float


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    note: str = field(default="", compare=False)


def one_by_one(keys: Iterable[object]) -> list[int]:
    return [key_hash(key) for key in keys]


# --- A column is hashed as its keys are -----------------------------------------------------------

# Characters of every length in UTF-8, the zero character and lone surrogates.
characters = st.one_of(
    st.characters(), st.characters(categories=["Cs"]), st.sampled_from("\0aé€🦀\ud800\udfff")
)
texts = st.text(characters, max_size=40)
blobs = st.one_of(st.binary(max_size=40), st.lists(st.sampled_from([0, 1]), max_size=20).map(bytes))
small_ints = st.integers(-(1 << 63), (1 << 63) - 1)
big_ints = st.integers(-(1 << 80), 1 << 80)
simple = st.one_of(
    st.none(),
    st.booleans(),
    big_ints,
    texts,
    blobs,
    st.floats(allow_nan=False),
    st.decimals(-1000, 1000, places=3),
    st.fractions(max_denominator=1000),
    st.complex_numbers(allow_nan=False),
    st.datetimes(timezones=st.sampled_from([None, UTC, EAST, WEST])),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from([*Colour, *Level, *Unit, *Access, Pair("ada", 1), Point(1, 2)]),
    st.sampled_from([np.int8(-3), np.uint64(MASK), np.float32(0.5), np.bool_(True), np.str_("é")]),
)
keys = st.recursive(
    simple,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3).map(tuple),
        st.frozensets(st.one_of(texts, big_ints), max_size=3),
    ),
    max_leaves=5,
)


@quick
@given(st.lists(texts))
@example([""])
@example(["", "", ""])
@example(["\0", "", "\0\0"])
@example(["a\0", "a", "\0a"])
@example(["\ud83e", "\udd80", "\ud83e\udd80", "🦀"])
@example(["", "x" * 10_000, "é" * 4_999, "x" * 8])
def test_a_column_of_str_is_hashed_as_its_keys_are(column: list[str]) -> None:
    assert hash_keys(column).tolist() == one_by_one(column)


@quick
@given(st.lists(blobs))
@example([b"", b"\0", b"\0\0"])
@example([b"", b"\xff" * 10_000, b"12345678"])
def test_a_column_of_bytes_is_hashed_as_its_keys_are(column: list[bytes]) -> None:
    assert hash_keys(column).tolist() == one_by_one(column)


@quick
@given(st.lists(small_ints))
@example([0, -1, 1, -(1 << 63), (1 << 63) - 1])
def test_a_column_of_int_is_hashed_as_its_keys_are(column: list[int]) -> None:
    assert hash_keys(column).tolist() == one_by_one(column)


@quick
@given(st.lists(big_ints))
@example([0, 1 << 63])
@example([-(1 << 63) - 1, 0])
@example([1 << 200, -(1 << 200)])
def test_a_column_with_ints_beyond_64_bits_is_hashed_as_its_keys_are(column: list[int]) -> None:
    assert hash_keys(column).tolist() == one_by_one(column)


@quick
@given(st.lists(keys))
@example(["a", 1])
@example([1, "a"])
@example([1, 1.5])
@example([b"a", "a"])
@example([True, None])
@example([1, np.int64(2), np.uint8(3), Level.HIGH])
@example(["a", np.str_("b"), Unit.METRE])
@example([b"a", np.bytes_(b"b")])
def test_a_mixed_column_is_hashed_as_its_keys_are(column: list[Any]) -> None:
    assert hash_keys(column).tolist() == one_by_one(column)


def _without_nan(column: np.ndarray[Any, Any]) -> bool:
    return bool((column == column).all())


number_arrays = st.one_of(
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.boolean_dtypes(),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
).flatmap(lambda dtype: hnp.arrays(dtype, st.integers(0, 20)).filter(_without_nan))


@quick
@given(number_arrays)
@example(np.array([0, 1, MASK], dtype=np.uint64))
@example(np.array([math.inf, -math.inf, -0.0, 0.5]))
def test_an_array_of_numbers_is_hashed_as_its_keys_are(column: np.ndarray[Any, Any]) -> None:
    assert hash_keys(column).tolist() == one_by_one(column)
    assert hash_keys(column).tolist() == one_by_one(column.tolist())


@quick
@given(st.lists(texts), st.lists(keys, max_size=10))
def test_an_array_of_text_or_objects_is_hashed_as_its_keys_are(
    words: list[str], things: list[Any]
) -> None:
    text = np.array(words, dtype=np.str_)
    assert hash_keys(text).tolist() == one_by_one(text)
    objects = np.empty(len(things), dtype=object)
    objects[:] = things
    assert hash_keys(objects).tolist() == one_by_one(things)


def test_a_view_of_an_array_is_hashed_as_a_copy_of_it() -> None:
    column = np.arange(20)
    column.flags.writeable = False
    assert hash_keys(column[::-3]).tolist() == one_by_one(range(19, -1, -3))


def test_an_empty_column_has_no_hashes() -> None:
    columns: list[Any] = [[], (), *(np.array([], dtype=kind) for kind in "iUOf")]
    for column in columns:
        hashes = hash_keys(column)
        assert hashes.dtype == np.uint64
        assert hashes.shape == (0,)


def test_a_buffer_with_offsets_is_hashed_as_the_strings_in_it() -> None:
    words = ["", "ada", "grace hopper", "", "é" * 20, "12345678"]
    encoded = [word.encode() for word in words]
    ends = np.cumsum([len(word) for word in encoded])
    lengths = np.array([len(word) for word in encoded])
    data = np.frombuffer(b"".join(encoded) + b"whatever", dtype=np.uint8)
    assert hash_buffer(STR, data, ends - lengths, lengths).tolist() == one_by_one(words)


# --- Equal keys hash equal ------------------------------------------------------------------------


@quick
@given(st.integers(-(1 << 53), 1 << 53))
def test_a_whole_number_has_one_hash_in_every_type(number: int) -> None:
    same = (float(number), Decimal(number), Fraction(number), complex(number), np.int64(number))
    assert set(one_by_one(same)) == {key_hash(number)}


@quick
@given(st.floats(allow_nan=False, allow_infinity=False))
@example(5e-324)
@example(sys.float_info.max)
@example(-0.0)
def test_a_float_has_the_hash_of_the_same_number_in_every_type(number: float) -> None:
    same = (Decimal(number), Fraction(number), complex(number), np.float64(number))
    assert set(one_by_one(same)) == {key_hash(number)}


@quick
@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([1, 2, 4])), min_size=2, max_size=2))
def test_numbers_that_are_equal_hash_equal(ratios: list[tuple[int, int]]) -> None:
    kinds: list[Any] = []
    for over, under in ratios:
        kinds += [Fraction(over, under), over / under, Decimal(over) / under, complex(over / under)]
    for one in kinds:
        for other in kinds:
            assert (one == other) == (key_hash(one) == key_hash(other))


MIDNIGHT = datetime.datetime(2024, 2, 29, 0, 0, 0, 1, tzinfo=UTC)

EQUAL: list[tuple[Any, ...]] = [
    (1, 1.0, True, Decimal(1), Decimal("1.00"), Fraction(2, 2), 1 + 0j, np.uint8(1), np.float16(1)),
    (0, 0.0, -0.0, False, Decimal("-0"), complex(-0.0, -0.0), np.bool_(False)),
    (0.5, Decimal("0.50"), Fraction(1, 2), 0.5 + 0j, np.float32(0.5), np.complex64(0.5)),
    (1 << 70, float(1 << 70), Decimal(1 << 70), Fraction(1 << 70)),
    (-(1 << 63), float(-(1 << 63)), np.int64(-(1 << 63))),
    ((1 << 64) - 1, np.uint64(MASK)),
    (math.inf, Decimal("Infinity"), np.float64(math.inf), complex(math.inf, 0)),
    (-math.inf, Decimal("-Infinity")),
    (1 + 2j, np.complex128(1 + 2j)),
    (2, Level.HIGH, 2.0),
    ("m", Unit.METRE, np.str_("m")),
    (b"m", np.bytes_(b"m"), memoryview(b"m")),
    (("ada", 1), Pair("ada", 1), Pair("ada", True), ("ada", Decimal(1))),
    ((1, (2.0, ("m",))), (True, (Level.HIGH, (Unit.METRE,)))),
    (
        MIDNIGHT,
        MIDNIGHT.astimezone(EAST),
        MIDNIGHT.astimezone(WEST),
        MIDNIGHT.replace(fold=1),
    ),
    (datetime.time(12, tzinfo=UTC), datetime.time(17, 45, tzinfo=EAST)),
    (datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 1, fold=1)),
    (datetime.timedelta(days=1), datetime.timedelta(hours=24)),
    (uuid.UUID(int=7), uuid.UUID("00000000-0000-0000-0000-000000000007")),
    (frozenset("abcdefgh"), frozenset("hgfedcba")),
    (frozenset({1, "a"}), frozenset({"a", 1.0})),
    (Point(1, 2), Point(1.0, 2.0), Point(1, 2, note="not compared")),
    (Access.READ | Access.WRITE, Access(3)),
]


@pytest.mark.parametrize("same", EQUAL, ids=lambda same: type(same[0]).__name__)
def test_keys_that_are_equal_hash_equal(same: tuple[Any, ...]) -> None:
    assert all(key == same[0] for key in same)
    assert set(one_by_one(same)) == {key_hash(same[0])}
    assert set(hash_keys(same).tolist()) == {key_hash(same[0])}


@quick
@given(st.frozensets(st.one_of(texts, big_ints)), st.randoms(use_true_random=False))
def test_the_order_in_which_a_frozenset_was_filled_does_not_matter(
    things: frozenset[object], random: Any
) -> None:
    shuffled = sorted(things, key=repr)
    random.shuffle(shuffled)
    assert key_hash(frozenset(shuffled)) == key_hash(things)


@quick
@given(st.datetimes(timezones=st.just(UTC)), st.integers(-1439, 1439))
@example(datetime.datetime.min.replace(tzinfo=UTC), 1)
@example(datetime.datetime.max.replace(tzinfo=UTC), -1)
def test_an_aware_datetime_is_hashed_by_its_instant(
    moment: datetime.datetime, minutes: int
) -> None:
    zone = datetime.timezone(datetime.timedelta(minutes=minutes))
    try:
        elsewhere = moment.astimezone(zone)
    except OverflowError:  # before year 1 or after year 9999 over there
        return
    assert key_hash(elsewhere) == key_hash(moment)


class Turning(datetime.tzinfo):
    """A zone at the end of its summer: the second fold of a wall time is an hour later."""

    def utcoffset(self, moment: datetime.datetime | None) -> datetime.timedelta:
        return datetime.timedelta(hours=1 if moment and moment.fold else 2)

    def dst(self, moment: datetime.datetime | None) -> None:
        return None

    def tzname(self, moment: datetime.datetime | None) -> str:
        return "turning"


def test_both_folds_of_a_wall_time_are_equal_in_python_and_so_hash_equal() -> None:
    first = datetime.datetime(2024, 10, 27, 2, 30, tzinfo=Turning())
    second = first.replace(fold=1)
    assert first == second
    assert key_hash(first) == key_hash(second)


DIFFERENT: list[Any] = [
    *("", "a", "a\0", "\0a", "\0", "1", "a" * 8, "a" * 9, "a" * 16),
    *(b"", b"a", b"a\0", b"\0", b"\0\0", b"1"),
    *(0, 1, -1, 1 << 63, -(1 << 63), 1 << 64, 0.5, -0.5, 1e-300, math.inf, -math.inf),
    *(1j, 1 + 1j, None, Colour.RED, Colour.GREEN, Access.READ, Access.READ | Access.WRITE),
    *((), (1,), ((1,),), (1, 2), (2, 1), ("a",), ("a", ""), (None,)),
    *(frozenset(), frozenset({1}), frozenset({1, 2}), frozenset({frozenset()})),
    *(Point(1, 2), Point(2, 1), uuid.UUID(int=0), uuid.UUID(int=1)),
    *(datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1), MIDNIGHT, datetime.time(0)),
    *(datetime.timedelta(0), datetime.timedelta(1), datetime.timedelta(microseconds=1)),
]


def test_keys_that_differ_are_not_all_thrown_together() -> None:
    assert len(set(one_by_one(DIFFERENT))) == len(DIFFERENT)


# --- The function is for ever ---------------------------------------------------------------------


def written_down_text(tag: int, data: bytes) -> int:
    """The hash as the module's docstring tells it, word for word."""
    h = tag ^ (len(data) * P2) & MASK
    padded = data + bytes(-len(data) % 8)
    for at in range(0, len(padded), 8):
        w = sum(byte << (8 * place) for place, byte in enumerate(padded[at : at + 8]))
        h = (h ^ w) * P1 & MASK
        h = (h ^ (h >> 32)) * P3 & MASK
        h = h ^ (h >> 29)
    return written_down_finish(h)


def written_down_number(n: int) -> int:
    return written_down_finish((n % (1 << 64) ^ INT) * P1 & MASK)


def written_down_finish(h: int) -> int:
    h = (h ^ (h >> 33)) * P3 & MASK
    return h ^ (h >> 32)


@quick
@given(st.text(), blobs, small_ints)
def test_the_function_is_the_one_that_is_written_down(text: str, data: bytes, number: int) -> None:
    assert key_hash(text) == written_down_text(STR, text.encode())
    assert key_hash(data) == written_down_text(BYTES, data)
    assert key_hash(number) == written_down_number(number)


GOLDEN: list[tuple[Any, int]] = [
    ("", 0x02CA8A31E96BBBFC),
    ("ada", 0x98E012F8E43A19D2),
    ("Grace Hopper, rear admiral", 0xA50A37AB70F45A27),
    ("naïve 🦀 \0", 0xDB77110EFDCB88E4),
    ("\ud800", 0x8627630525484322),
    (b"ada", 0x543A430FF0ADEFF5),
    (0, 0x517CCABC137FC5E9),
    (1, 0x8E12ACAD8F95AC1A),
    (-1, 0x966110EE00D47783),
    ((1 << 63) - 1, 0x1B0BADBB4DBECAD6),
    (1 << 63, 0x51FBB1C811F62821),
    (0.5, 0x188588CB03C7DAAB),
    (Decimal("0.1"), 0xBBB90ABB2CE5715C),
    (-math.inf, 0x48EF886233C2F2B3),
    (1 + 2j, 0xAF8606E5E17F44DC),
    (None, 0xE53ACC1FF963441F),
    ((), 0xA02CD169CEDB6F64),
    (("ada", 1, None), 0x85BB5E2FF3F0F171),
    ((("ada",), (b"", 2.5)), 0x4429E2641A3EF95E),
    (frozenset({"ada", "grace", 1}), 0x12ED1F95EB709096),
    (Colour.GREEN, 0xA571A79E4D614331),
    (Access.READ | Access.WRITE, 0x5A94F00694530E32),
    (Point(1, 2.5), 0x24B74F440336FF5B),
    (datetime.date(2024, 2, 29), 0xA5C1C5D9B573BA35),
    (datetime.datetime(2024, 2, 29, 12, 30), 0xD0FE638ECBCC8CB2),
    (datetime.datetime(2024, 2, 29, 12, 30, tzinfo=EAST), 0xFF618FD5FC9A2E0F),
    (datetime.time(12, 30), 0xCFF5D9885A76FEC2),
    (datetime.timedelta(days=-1, microseconds=5), 0xB76877C663F821E6),
    (uuid.UUID("12345678-1234-5678-1234-567812345678"), 0xAC9EA498D5E763A8),
]


@pytest.mark.parametrize(("key", "value"), GOLDEN, ids=[type(key).__name__ for key, _ in GOLDEN])
def test_a_hash_never_changes(key: Any, value: int) -> None:
    """State is found by it: another value here means that no old snapshot can be loaded."""
    assert key_hash(key) == value
    assert hash_keys([key]).tolist() == [value]


SCRIPT = """
import datetime, enum, uuid
from dataclasses import dataclass
from decimal import Decimal
from railgun.hashing import hash_keys
class Colour(enum.Enum):
    RED = 1
@dataclass(frozen=True)
class Point:
    x: object
    y: object
words = ["ada", "grace", "edsger", "\\ud800", ""]
print(hash("ada"))
names = frozenset(words)
others = [1, None, 0.5, Decimal("0.1"), b"ada", Colour.RED, names, (names, "x"), Point("a", names),
    uuid.UUID(int=5), datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)]
print(hash_keys(words).tolist(), hash_keys(others).tolist())
"""


def test_a_hash_does_not_depend_on_the_process() -> None:
    salted, stable = set(), set()
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        salt, hashes = ran.stdout.splitlines()
        salted.add(salt)
        stable.add(hashes)
    assert len(salted) == 2, "the processes were to differ in Python's own hash"
    assert len(stable) == 1


# --- What cannot be a key is refused --------------------------------------------------------------


@dataclass
class Changeable:
    x: int


@dataclass(eq=False)
class Identical:
    x: int


class Nested:
    class Thing:
        pass


REFUSED: list[tuple[Any, str, str]] = [
    (["ada"], "list", "it can change"),
    ({"ada": 1}, "dict", "it can change"),
    ({"ada"}, "set", "it can change"),
    (bytearray(b"ada"), "bytearray", "it can change"),
    (Changeable(1), "Changeable", "it can change"),
    (object(), "object", "does not know which of them are equal"),
    (np.datetime64("2024-01-01"), "datetime64", "does not know which of them are equal"),
    (np.timedelta64(1, "s"), "timedelta64", "does not know which of them are equal"),
    (Identical(1), "Identical", "does not know which of them are equal"),
    (Point, "type", "does not know which of them are equal"),
    (Nested.Thing(), r"Nested\.Thing", "does not know which of them are equal"),
]


@pytest.mark.parametrize(("key", "kind", "why"), REFUSED, ids=[kind for _, kind, _ in REFUSED])
def test_what_cannot_be_a_key_is_refused_with_its_type_and_what_to_do(
    key: Any, kind: str, why: str
) -> None:
    message = rf"^a {kind} cannot be a key: .*{why}.* Use a .* The key was "
    for single in (key, (1, key), (1, (2, key))):
        with pytest.raises(KeyTypeError, match=message):
            key_hash(single)
    for column in ([key], ["ada", key], [1, key], [None, key]):
        with pytest.raises(KeyTypeError, match=message):
            hash_keys(column)


def test_the_refusal_of_a_class_tells_of_stable_key() -> None:
    with pytest.raises(KeyTypeError, match="__stable_key__"):
        key_hash(object())


def test_the_refusal_of_a_large_key_is_short() -> None:
    with pytest.raises(KeyTypeError) as refusal:
        key_hash(list(range(100_000)))
    assert len(str(refusal.value)) < 300


def test_a_refusal_can_be_caught_as_a_type_error_and_as_one_of_ours() -> None:
    assert issubclass(KeyTypeError, TypeError)
    assert issubclass(KeyTypeError, RailgunError)


# --- A class can tell its identity ----------------------------------------------------------------


class Account:
    def __init__(self, number: object, balance: int) -> None:
        self.number = number
        self.balance = balance

    def __stable_key__(self) -> object:
        return ("account", self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Account) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


@dataclass(frozen=True)
class Word:
    text: str

    def __stable_key__(self) -> object:
        return self.text.casefold()


def test_a_class_is_hashed_by_its_stable_key() -> None:
    assert key_hash(Account(7, balance=1)) == key_hash(Account(7.0, balance=2))
    assert key_hash(Account(7, balance=1)) == key_hash(("account", 7))
    assert key_hash(Account(7, balance=1)) != key_hash(Account(8, balance=1))


def test_a_stable_key_is_honoured_within_other_keys_and_columns() -> None:
    assert key_hash((1, Account(7, 0))) == key_hash((1, ("account", 7)))
    assert key_hash(Account(Account(7, 0), 0)) == key_hash(("account", ("account", 7)))
    assert hash_keys([Account(7, 0), "x"]).tolist() == one_by_one([("account", 7), "x"])


def test_a_stable_key_wins_over_the_fields_of_a_dataclass() -> None:
    assert key_hash(Word("Ada")) == key_hash(Word("ADA")) == key_hash("ada")


def test_a_stable_key_that_cannot_be_a_key_is_refused_by_its_own_name() -> None:
    with pytest.raises(KeyTypeError, match=r"^a list cannot be a key"):
        key_hash(Account([7], 0))


# --- Keys spread evenly ---------------------------------------------------------------------------

COUNT = 100_000
SPREAD: dict[str, Any] = {
    "ints": range(COUNT),
    "ints, every 4096th": range(0, COUNT * 4096, 4096),
    "negative ints": range(-COUNT, 0),
    "short text": [str(n) for n in range(COUNT)],
    "text with a prefix": [f"customer-{n:09d}" for n in range(COUNT)],
    "text with a suffix": [f"{n}@example.com" for n in range(COUNT)],
    "bytes": [n.to_bytes(8, "big") for n in range(COUNT)],
}


@pytest.mark.parametrize("keys", SPREAD.values(), ids=SPREAD.keys())
def test_sequential_keys_spread_over_the_slots_as_if_by_chance(keys: Any) -> None:
    slots = (hash_keys(keys) >> np.uint64(52)).astype(np.int64)
    filled = np.bincount(slots, minlength=4096)
    assert len(filled) == 4096
    by_chance = math.sqrt(COUNT / 4096)
    assert 0.9 * by_chance < filled.std() < 1.1 * by_chance


def test_structured_text_does_not_collide() -> None:
    """Keys that differ in three places, eight bytes apart: a weak mix would cancel the differences."""
    letters = [chr(code) for code in range(33, 127, 3)]
    keys = [f"abcdefg{a}abc{b}efg{c}" for a in letters for b in letters for c in letters]
    assert len(set(hash_keys(keys).tolist())) == len(keys)


def test_columns_refuse_what_single_keys_refuse() -> None:
    """Whichever key comes first."""
    for column in (
        [b"a", bytearray(b"b")],
        [b"a", np.arange(2)],
        [1, np.array(5)],
        [1, np.timedelta64(5, "s")],
        np.array(["2024-02-29"], dtype="M8[ns]"),
        np.array([5], dtype="m8[s]"),
        np.zeros((2, 2), dtype=np.int64),
    ):
        with pytest.raises(KeyTypeError):
            hash_keys(column)


def test_a_memoryview_in_a_column_of_bytes_is_its_bytes() -> None:
    wide = memoryview(b"abcdefgh").cast("i")
    assert hash_keys([b"a", wide, b"c"]).tolist() == [
        key_hash(k) for k in (b"a", b"abcdefgh", b"c")
    ]


class Half(float, enum.Enum):
    HALF = 0.5


@dataclass(frozen=True)
class Base:
    x: int


@dataclass(frozen=True, eq=False)
class Inherited(Base):
    y: int


@dataclass(frozen=True)
class OwnEquality:
    x: int
    y: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnEquality) and self.x == other.x

    def __hash__(self) -> int:
        return self.x


def test_an_enum_of_numbers_is_its_number() -> None:
    assert key_hash(Half.HALF) == key_hash(0.5)


@pytest.mark.parametrize("key", [Inherited(1, 2), OwnEquality(1, 2)])
def test_a_dataclass_whose_equality_is_not_of_its_fields_is_refused(key: object) -> None:
    with pytest.raises(KeyTypeError, match="__stable_key__"):
        key_hash(key)


class AnyCase(str):
    """Text that is equal whatever its case."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.lower() == other.lower()

    def __hash__(self) -> int:
        return hash(self.lower())


class TellingCase(AnyCase):
    __slots__ = ()

    def __stable_key__(self) -> str:
        return self.lower()


class Parity(int):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and int(self) % 2 == int(other) % 2

    def __hash__(self) -> int:
        return int(self) % 2


class ByPlace(bytes):
    """Equal by its bytes, and found by where it lies."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)


class Rough(float):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and round(self) == round(other)

    def __hash__(self) -> int:
        return round(self)


class Length(tuple[int, ...]):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and len(self) == len(other)

    def __hash__(self) -> int:
        return len(self)


class Ordinal(enum.IntEnum):
    ONE = 1
    UNO = 3

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and int(self) % 2 == int(other) % 2

    def __hash__(self) -> int:
        return 1


class Mood(enum.Enum):
    GOOD = "good"
    FINE = "fine"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mood)

    def __hash__(self) -> int:
        return 1


@pytest.mark.parametrize(
    "key",
    [AnyCase("a"), Parity(1), ByPlace(b"a"), Rough(1.2), Length((1, 2)), Ordinal.ONE, Mood.GOOD],
    ids=lambda key: type(key).__name__,
)
def test_a_subclass_with_an_equality_of_its_own_is_refused_wherever_it_stands(key: Any) -> None:
    plain: Any = {str: "a", int: 1, bytes: b"a", float: 1.5, tuple: (1,), enum.Enum: None}
    beside = next(value for kind, value in plain.items() if isinstance(key, kind))
    for column in [[key], [beside, key], [key, beside], [(1, key)], [frozenset([key])]]:
        with pytest.raises(
            KeyTypeError, match=rf"a {type(key).__name__} cannot be.*__stable_key__"
        ):
            hash_keys(column)
    with pytest.raises(KeyTypeError):
        key_hash(key)


def test_one_that_tells_its_identity_is_hashed_by_it() -> None:
    keys = ["Ada", TellingCase("ADA"), TellingCase("ada")]
    assert hash_keys(keys).tolist() == [key_hash("Ada"), key_hash("ada"), key_hash("ada")]


class Name(str):
    __slots__ = ()


class Count(int):
    pass


class Paint(enum.StrEnum):
    RED = "red"


def test_subclasses_that_are_equal_as_what_they_come_from_hash_as_it_does() -> None:
    assert (
        hash_keys([Name("a"), Paint.RED, np.str_("b")]).tolist()
        == hash_keys(["a", "red", "b"]).tolist()
    )
    assert hash_keys([Count(1), Level.LOW, True]).tolist() == hash_keys([1, 1, 1]).tolist()
    assert key_hash(np.float64(1.5)) == key_hash(1.5)


@pytest.mark.parametrize(
    "key",
    [10**5000, Decimal("1e5000"), Decimal("1e-5000"), Fraction(1, 10**5000)],
    ids=["int", "large", "small", "ratio"],
)
def test_numbers_of_any_length_have_a_hash(key: Any) -> None:
    assert 0 <= key_hash(key) < 1 << 64
    if key == int(key):
        assert key_hash(key) == key_hash(int(key))


NAN = math.nan
NANS: list[Any] = [
    *(
        NAN,
        -NAN,
        np.float64("nan"),
        np.float32("nan"),
        np.float16("nan"),
        Decimal("NaN"),
        Decimal("-NaN7"),
        Decimal("sNaN"),
    ),
    *(complex(NAN, 0), complex(0, NAN), complex(1, NAN), np.complex128(complex(NAN, 1))),
    *((NAN,), ("a", (1, NAN)), frozenset({NAN}), (Decimal("NaN"), "b"), Point(1, NAN)),
    *(np.datetime64("NaT"), np.timedelta64("NaT")),
]


@pytest.mark.parametrize("key", NANS, ids=repr)
def test_what_does_not_equal_itself_is_refused_alone_and_in_columns(key: Any) -> None:
    for column in ([key], [0.5, key], ["ada", key], [1, key], [(1, 2), key]):
        with pytest.raises(KeyTypeError, match="cannot be a key"):
            hash_keys(column)
    with pytest.raises(KeyTypeError, match="cannot be a key"):
        key_hash(key)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", "O", "M8[us]", "m8[us]"])
def test_an_array_with_a_value_that_does_not_equal_itself_is_refused(dtype: str) -> None:
    column = np.array(["NaT" if dtype[0] in "Mm" else NAN], dtype=dtype)
    with pytest.raises(KeyTypeError, match="cannot be a key"):
        hash_keys(column)


class Unequal:
    def __stable_key__(self) -> int:
        return 1


def test_a_class_whose_objects_are_never_equal_is_refused() -> None:
    with pytest.raises(KeyTypeError, match="Give the class __eq__"):
        key_hash(Unequal())


@quick
@given(st.recursive(keys | st.floats() | st.decimals() | st.complex_numbers(), st.tuples))
@example(0.0)
@example(-0.0)
@example((-0.0, True))
def test_every_key_equals_itself_after_a_journey_or_is_refused(key: Any) -> None:
    try:
        hashed = key_hash(key)
    except KeyTypeError:
        return
    again = pickle.loads(pickle.dumps(key))
    assert again == key
    assert {key: "state"}[again] == "state"
    assert key_hash(again) == hashed == hash_keys([again])[0]


@pytest.mark.parametrize("key", [Decimal("sNaN"), Decimal("-sNaN7"), ("a", Decimal("sNaN"))])
def test_a_signalling_nan_is_refused_as_other_nans_are(key: object) -> None:
    with pytest.raises(
        KeyTypeError, match=r"sNaN7?.* cannot be a key, .*NaN does not equal itself"
    ):
        key_hash(key)


class NotATime(datetime.datetime):
    """Has the class and the equality of pandas.NaT."""

    def __ne__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1

    def toordinal(self) -> int:
        raise ValueError("NaTType does not support toordinal")


def test_a_time_that_does_not_equal_itself_is_refused() -> None:
    with pytest.raises(KeyTypeError, match="a NotATime cannot be a key"):
        key_hash(NotATime(2026, 1, 1))


class Nowhere(datetime.tzinfo):
    def utcoffset(self, dt: datetime.datetime | None) -> datetime.timedelta:
        raise ValueError("boom")

    def dst(self, dt: datetime.datetime | None) -> None:
        pass

    def tzname(self, dt: datetime.datetime | None) -> None:
        pass


def test_what_a_timezone_raises_is_told_as_itself() -> None:
    with pytest.raises(ValueError, match=r"^boom$"):
        key_hash(datetime.datetime(2026, 1, 1, tzinfo=Nowhere()))


class Raising:
    def __init__(self, identity: object = 1, error: BaseException | None = None) -> None:
        self.identity, self.error = identity, error

    def __stable_key__(self) -> object:
        if isinstance(self.identity, BaseException):
            raise self.identity
        return self.identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Raising)

    def __hash__(self) -> int:
        if self.error is not None:
            raise self.error
        return 1


ERRORS = [ValueError("boom"), OverflowError("boom"), StopIteration("boom"), SystemExit(3)]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_the_code_of_a_key_raises_is_told_with_the_method(error: BaseException) -> None:
    for method, key in ("__stable_key__", Raising(error)), ("__hash__", Raising(1, error)):
        for column in [key], [1, key, 2], ["a", (key, 1)], [Raising((1, key))]:
            with pytest.raises(KeyCodeError) as caught:
                hash_keys(column)
            assert str(caught.value) == f"Raising.{method} of a key raised {error!r}"
            assert caught.value.__cause__ is error
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_interrupt_in_the_code_of_a_key_passes() -> None:
    for key in Raising(KeyboardInterrupt()), Raising(1, KeyboardInterrupt()):
        with pytest.raises(KeyboardInterrupt):
            hash_keys([key])


class Unhashable:
    def __stable_key__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise ValueError("no repr")


def test_a_class_with_a_stable_key_but_without_a_hash_is_refused() -> None:
    with pytest.raises(KeyTypeError, match=r"Give the class __hash__.*Unhashable that has no repr"):
        key_hash(Unhashable())


def test_how_far_a_column_is_hashed_can_be_told_from_the_iterator() -> None:
    keys = [Raising(1), Raising(2), Raising(KeyboardInterrupt()), Raising(4)]
    walked = iter(keys)
    with pytest.raises(KeyboardInterrupt):
        hash_keys(keys, walked)
    assert list(walked) == keys[3:]
    assert hash_keys(keys[:2], iter(keys)).tolist() == [key_hash(1), key_hash(2)]


def test_one_very_long_key_among_short_ones() -> None:
    keys = ["short", "x" * 100_003, "", "also short", "y" * 4_321]
    assert hash_keys(keys).tolist() == [key_hash(key) for key in keys]
