"""Sources bounded by what they have now: whatever comes later, they bring the same; and what came later is not lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from railgun import Directory, Generate, Items, Source
from railgun.flows.source import Reader, is_empty


def drain(source: Source[Any], part: Any, most: int = 3) -> tuple[list[Any], Any]:
    """All a part has, and where its reader stands then."""
    reader = source.open(part, None)
    items: list[Any] = []
    while (read := reader.read(most, now=0)) is not None:
        assert read, "nothing is on its way"
        items += read
    return items, reader.position


@pytest.mark.parametrize("watch", [False, True])
def test_a_directory_that_grows(tmp_path: Path, watch: bool) -> None:
    (tmp_path / "a").write_text("one\ntwo\nthr")
    now = Directory(tmp_path, watch=watch).as_of_now()
    with (tmp_path / "a").open("a") as file:
        file.write("ee\nfour\n")
    (tmp_path / "b").write_text("new\n")
    assert list(now.partitions()) == ["a"]
    first, position = drain(now, "a")
    assert (first, position) == drain(now, "a")
    assert first == (["one", "two"] if watch else ["one", "two", "thr"])
    if watch:  # the line that was not complete comes later, whole
        after = Directory(tmp_path, watch=True).open("a", position)
        assert after.read(10, now=0) == ["three", "four"]


@pytest.mark.parametrize("seed", range(20))
def test_every_line_is_read_once_wherever_the_file_ended_then(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(f"{n} {'x' * rng.randrange(30)}\n" for n in range(50))
    cut = rng.randrange(len(text))
    file = tmp_path / "a"
    file.write_text(text[:cut])
    source = Directory(tmp_path, watch=True)
    now = source.as_of_now()
    file.write_text(text)
    before, position = drain(now, "a", most=rng.randint(1, 60))
    reader: Reader[Any] = source.open("a", position)
    after: list[Any] = []
    while read := reader.read(7, now=0):
        after += read
    assert before + after == text.splitlines()


def test_what_is_made_has_all_of_it_now() -> None:
    made = Generate(lambda index, random: index, rate=1, count=10)
    assert drain(made.as_of_now(), 0)[0] == list(range(10))
    assert Items("ab").as_of_now().partitions() == range(1)
    with pytest.raises(NotImplementedError, match="Generate does not know"):
        Generate(lambda index, random: index).as_of_now()


def test_what_has_nothing_yet(tmp_path: Path) -> None:
    assert is_empty(Directory(tmp_path))
    (tmp_path / "a").write_text("")
    assert is_empty(Directory(tmp_path))
    (tmp_path / "a").write_text("x")
    assert not is_empty(Directory(tmp_path))
    assert not is_empty(Directory(tmp_path / "missing"))  # nobody knows
    assert not is_empty(Generate(lambda index, random: index))
