"""The validator itself: known-bad output must not pass, each with its fault named."""

from __future__ import annotations

import pytest
from verification.stream_validator import check_streams

SENT = {"a": [0, 1, 2, 3], "b": [7]}


def rows(text: str) -> list[tuple[str, int]]:
    return [(one[0], int(one[1])) for one in text.split()]


@pytest.mark.parametrize("good", ["", "a0", "a0 b7 a1", "a0 a1 a2 a3 b7", "b7 a0 a1 a2 a3"])
def test_prefixes_pass(good: str) -> None:
    assert check_streams(rows(good), SENT, whole=False) == ""


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ("a0 a0 a1", "it came twice"),
        ("a0 a2", "one is lost"),
        ("a1", "one is lost"),
        ("a0 a2 a1", "out of order"),
        ("a0 a9", "never sent"),
        ("a0 a1 a2 a3 a3", "goes on after its end"),
        ("c0", "'c' was never sent"),
        ("b7 b7", "goes on after its end"),
    ],
)
def test_what_is_wrong_is_found(bad: str, fault: str) -> None:
    assert fault in check_streams(rows(bad), SENT, whole=False)


def test_the_whole_is_more_than_a_prefix() -> None:
    assert check_streams(rows("a0 a1 a2 a3 b7"), SENT, whole=True) == ""
    assert "ends after 3 of 4" in check_streams(rows("a0 a1 a2 b7"), SENT, whole=True)
    assert "'b' ends after 0 of 1" in check_streams(rows("a0 a1 a2 a3"), SENT, whole=True)
