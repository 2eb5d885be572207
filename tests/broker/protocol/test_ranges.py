"""Ranges beside a dictionary of offsets, and shares beside giving out one by one."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railgun.broker.protocol.groups import ranges as ranges_module
from railgun.broker.protocol.groups.ranges import Ranges
from railgun.broker.protocol.groups.shares import shares


def cells(ranges: Ranges[int]) -> dict[int, int]:
    return {offset: value for first, end, value in ranges for offset in range(first, end)}


@pytest.mark.parametrize("seed", range(20))
def test_ranges_are_as_a_dictionary_of_offsets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges_module, "CHUNK_RANGES", 3)  # many chunks
    chance = Random(seed)
    ranges: Ranges[int] = Ranges()
    naive: dict[int, int] = {}
    for _ in range(400):
        first = chance.randrange(100)
        end = first + chance.choice([1, 1, 2, 5, 30])
        inside = {offset: naive[offset] for offset in range(first, end) if offset in naive}
        assert cells(Ranges(ranges.pieces(first, end))) == inside
        doing = chance.random()
        if doing < 0.6:
            value = chance.randrange(3)
            ranges.set(first, end, value)
            naive |= dict.fromkeys(range(first, end), value)
        elif doing < 0.9:
            assert cells(Ranges(ranges.remove(first, end))) == inside
            naive = {o: v for o, v in naive.items() if o not in inside}
        else:
            most = chance.randint(1, 10)
            piece = ranges.pop(most, end)
            lowest = min(naive, default=end)
            assert (piece is None) == (lowest >= end)
            if piece is not None:
                assert piece[0] == lowest
                assert 0 < piece[1] - piece[0] <= most
                assert piece[1] <= end
                assert all(naive.pop(offset) == piece[2] for offset in range(*piece[:2]))
        assert cells(ranges) == naive
        assert ranges.total == len(naive)
        assert ranges.first == min(naive, default=None)
        assert ranges.end == (max(naive) + 1 if naive else None)
        pieces = list(ranges)
        assert len(ranges) == len(pieces)
        for (_, one, value), (other, _, following) in pairwise(pieces):
            assert one < other or (one == other and value != following), "touching and equal"
        twin = ranges.copy()
        assert twin == ranges
        twin.clear()
        assert not twin
        assert cells(ranges) == naive


def test_a_range_has_at_least_one_offset() -> None:
    ranges: Ranges[int] = Ranges([(0, 10, 1)])
    with pytest.raises(ValueError, match="at least one offset"):
        ranges.set(3, 3, 2)
    assert ranges.remove(3, 3) == []
    assert list(ranges) == [(0, 10, 1)]


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(0, 60))
def test_shares_are_as_giving_each_to_the_one_with_the_most_credit(
    free: list[int], messages: int
) -> None:
    free.sort(reverse=True)
    left = free.copy()
    for _ in range(messages):
        if not left or max(left) == 0:
            break
        left[left.index(max(left))] -= 1
    given = shares(free, messages)
    assert sorted(have - share for have, share in zip(free, given, strict=True)) == sorted(left)
    assert all(0 <= share <= have for have, share in zip(free, given, strict=True))
