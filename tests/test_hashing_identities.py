"""Classes that tell their identity or have an equality of their own are hashed by it or refused."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.hashed_keys import Level, one_by_one

from railgun.errors import KeyTypeError
from railgun.hashing import hash_keys, key_hash

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


# --- An equality of their own ---------------------------------------------------------------------


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
