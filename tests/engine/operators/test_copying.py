"""Copies of plain values: as `copy.deepcopy` makes them, and no value that says how it is copied is taken for plain."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import io
import pickle
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest

from railgun.engine.operators.copying import NOT_PLAIN, copied, own_copy, plain_copy


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    one: Any
    other: Any


Old = namedtuple("Old", ["one"])


class Thing:
    def __init__(self) -> None:
        self.n = 1
        self.items = [1, [2]]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Below(Thing):
    pass


class Slots:
    __slots__ = ("__hidden", "empty", "n")

    def __init__(self) -> None:
        self.n, self.__hidden = 1, [2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and (self.n, self.__hidden) == (other.n, other.__hidden)

    __hash__ = None  # type: ignore[assignment]


class Both(Slots):
    def __init__(self) -> None:
        super().__init__()
        self.more = {"a": [1]}


@dataclasses.dataclass
class Data:
    n: int
    items: list[int]


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int
    items: list[int]


@dataclasses.dataclass(slots=True)
class Slotted:
    n: int
    items: list[int]


PLAIN: list[Any] = [
    1, "a", None, (1, 2), (1, [2]), [], {}, {"a": [1, {"b": (1,)}]}, {(1, "a"): [1]}, {1, 2}, {(1, 2)},
    frozenset([(1, 2)]), deque([1, [2]], maxlen=3), defaultdict(list, a=[1]), Counter("aab"),
    OrderedDict(b=1, a=[2]), bytearray(b"abc"), np.arange(6).reshape(2, 3).T, [np.float64(1.5), np.int8(1)],
    [Colour.RED, Decimal("1.5"), datetime.date(2020, 1, 1)], Pair(1, [2]), Old([1]), Thing(), Below(), Slots(),
    Both(), Data(1, [2]), Frozen(1, [2]), Slotted(1, [2]), [Thing(), {"x": Data(1, [])}],
]  # fmt: skip


def changing_parts(value: Any) -> set[int]:
    """The identities of all in a value that may change, as pickle finds them."""
    found: dict[
        int, Any
    ] = {}  # the parts are kept, so that no other one can have the identity of one

    class Finder(pickle.Pickler):
        def persistent_id(self, part: Any) -> None:
            if isinstance(
                part,
                list | dict | set | deque | bytearray | np.ndarray | Thing | Slots | Data | Slotted,
            ):
                found[id(part)] = part

    Finder(io.BytesIO(), 5).dump(value)
    return set(found)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_a_copy_of_a_plain_value_is_equal_and_shares_nothing_that_can_change(value: Any) -> None:
    made = plain_copy(value)
    assert made is not NOT_PLAIN
    assert type(made) is type(value)
    expected = copy.deepcopy(value)
    if isinstance(value, np.ndarray):
        assert (made == expected).all()
        assert made.strides == expected.strides
    else:
        assert made == expected
    assert not changing_parts(made) & changing_parts(value)


def test_what_is_there_twice_stays_one_object_and_a_cycle_a_cycle() -> None:
    one: list[Any] = [1]
    made = plain_copy((one, {"a": one}, [one, (one,)]))
    assert made[0] is made[1]["a"] is made[2][0] is made[2][1][0]
    assert made[0] is not one
    one.append((one, "end"))
    turning = plain_copy(one)
    assert turning[1][0] is turning
    assert turning is not one


class Reduces:
    def __reduce__(self) -> Any:
        return list, ()


class Deep:
    def __deepcopy__(self, memo: Any) -> str:
        return "mine"


class State(Thing):
    def __getstate__(self) -> Any:
        return {}


class New(Thing):
    def __new__(cls) -> New:
        return super().__new__(cls)


class Attributes(Thing):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Text(str):
    __slots__ = ()


class Many(dict[str, int]):
    pass


class Weak:
    __slots__ = ("__weakref__",)


@pytest.mark.parametrize(
    "value",
    [
        Reduces(), Deep(), State(), New(), Attributes(), Text("a"), Many(), Weak(), ValueError(1), iter([1]),
        re.compile("a"), memoryview(b"a"), np.array([[1], None], dtype=object), types.SimpleNamespace(a=1),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_has_its_own_way_to_be_copied_is_odd_also_inside(value: Any) -> None:
    assert plain_copy(value) is NOT_PLAIN
    assert plain_copy({"a": [value]}) is NOT_PLAIN


def test_odd_values_are_copied_as_they_say() -> None:
    assert copied([Deep()]) == ["mine"]
    counting = (n for n in range(3))
    assert own_copy(counting) is counting


def test_what_is_nested_too_deeply_is_odd() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert plain_copy(value) is NOT_PLAIN
