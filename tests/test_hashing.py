"""The hash of a key is the same in columns, for equal keys, in every process, and in every release."""

from __future__ import annotations

import datetime
import math
import os
import subprocess
import sys
import uuid
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.hashed_keys import (
    EAST,
    UTC,
    WEST,
    Access,
    Colour,
    Level,
    Pair,
    Point,
    Unit,
    big_ints,
    blobs,
    keys,
    one_by_one,
    quick,
    texts,
)

from railgun.hashing import BYTES, INT, MASK, P1, P2, P3, STR, hash_buffer, hash_keys, key_hash

# --- A column is hashed as its keys are -----------------------------------------------------------


small_ints = st.integers(-(1 << 63), (1 << 63) - 1)


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


def test_a_memoryview_in_a_column_of_bytes_is_its_bytes() -> None:
    wide = memoryview(b"abcdefgh").cast("i")
    assert hash_keys([b"a", wide, b"c"]).tolist() == [
        key_hash(k) for k in (b"a", b"abcdefgh", b"c")
    ]


@pytest.mark.parametrize(
    "key",
    [10**5000, Decimal("1e5000"), Decimal("1e-5000"), Fraction(1, 10**5000)],
    ids=["int", "large", "small", "ratio"],
)
def test_numbers_of_any_length_have_a_hash(key: Any) -> None:
    assert 0 <= key_hash(key) < 1 << 64
    if key == int(key):
        assert key_hash(key) == key_hash(int(key))


def test_one_very_long_key_among_short_ones() -> None:
    keys = ["short", "x" * 100_003, "", "also short", "y" * 4_321]
    assert hash_keys(keys).tolist() == [key_hash(key) for key in keys]
