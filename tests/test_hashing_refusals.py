"""What cannot be a key is refused, and errors in the code of keys are told as such."""

from __future__ import annotations

import datetime
import math
import pickle
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.hashed_keys import Point, keys, quick

from railgun.errors import KeyCodeError, KeyTypeError, RailgunError
from railgun.hashing import hash_keys, key_hash

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


# --- Alone, in columns, and by what is raised -----------------------------------------------------


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


def test_how_far_a_column_is_hashed_can_be_told_from_the_iterator() -> None:
    keys = [Raising(1), Raising(2), Raising(KeyboardInterrupt()), Raising(4)]
    walked = iter(keys)
    with pytest.raises(KeyboardInterrupt):
        hash_keys(keys, walked)
    assert list(walked) == keys[3:]
    assert hash_keys(keys[:2], iter(keys)).tolist() == [key_hash(1), key_hash(2)]
