"""Sources that go on elsewhere without losing or doubling an item, and sinks."""

from __future__ import annotations

import io
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.flows.harness import Harness

from railgun import (
    Collect,
    ConnectorError,
    DeadLetter,
    Directory,
    Files,
    Flow,
    Generate,
    Items,
    Place,
    Print,
    Source,
)  # fmt: skip
from railgun.engine.operators.reading import Reading
from railgun.sources import directory
from railgun.transport.rows import RowBatch


def read_all(source: Source[Any], part: Any, most: int = 100, position: Any = None) -> list[Any]:
    reader = source.open(part, position)
    items: list[Any] = []
    while (read := reader.read(most, 0)) is not None:
        assert len(read) <= most
        items += read
    return items


def read_moving(
    source: Source[Any], part: Any, most: Callable[[], int], now: Any = lambda: 0
) -> list[Any]:
    """Read a part to its end by a new reader each time, as if it moved after every read."""
    items: list[Any] = []
    position = None
    while True:
        reader = source.open(part, position)
        wanted = most()
        read = reader.read(wanted, now())
        position = json.loads(json.dumps(reader.position))  # plain enough to travel
        reader.close()
        if read is None:
            return items
        assert len(read) <= wanted
        items += read


# ---------------------------------------------------------------- Items


@given(st.lists(st.integers(), max_size=20), st.integers(1, 5), st.integers(1, 7))
def test_items_are_dealt_out_to_parts(items: list[int], parts: int, most: int) -> None:
    source = Items(items, partitions=parts)
    read = [read_moving(source, part, lambda: most) for part in source.partitions()]
    assert sorted(chain.from_iterable(read)) == sorted(items)
    assert read[0] == items[::parts]


def test_items_need_a_part() -> None:
    with pytest.raises(ConnectorError, match="at least one partition, not 0"):
        Items([1], partitions=0)


# ---------------------------------------------------------------- Generate


def draw(index: int, random: random.Random) -> tuple[Any, ...]:
    return (
        index,
        random.random(),
        random.randrange(10**30),
        random.gauss(0, 1),
        random.choice("abc"),
    )


@given(st.integers(0, 60), st.integers(1, 5), st.integers(), st.data())
def test_an_item_depends_on_its_index_and_the_seed_only(
    count: int, parts: int, seed: int, data: st.DataObject
) -> None:
    alone = read_all(Generate(draw, count=count, seed=seed), 0)
    assert [item[0] for item in alone] == list(range(count))
    source = Generate(draw, count=count, partitions=parts, seed=seed)
    chance = data.draw(st.randoms())
    moved = [
        read_moving(source, part, lambda: chance.randint(1, 9)) for part in source.partitions()
    ]
    assert sorted(chain.from_iterable(moved)) == alone
    assert all(part == sorted(part) for part in moved)


def test_seeds_and_items_differ() -> None:
    def floats(seed: int) -> list[float]:
        return read_all(Generate(lambda i, random: random.random(), count=2_000, seed=seed), 0)

    first, second = floats(1), floats(2)
    assert len({*first, *second}) == 4_000
    assert 0.48 < sum(first) / 2_000 < 0.52
    bits = read_all(Generate(lambda i, random: random.getrandbits(200), count=500), 0)
    assert all(0 <= b < 1 << 200 for b in bits)
    assert max(bits) > 1 << 195
    shuffled = read_all(Generate(lambda i, random: random.sample(range(5), 5), count=300), 0)
    assert len(set(map(tuple, shuffled))) > 80


def test_items_of_a_rate_are_due_one_after_the_other() -> None:
    reader = Generate(lambda i, random: i, rate=10.0).open(0, None)
    start = 1_000_000_000
    assert reader.read(100, start) == [0]
    assert reader.read(100, start + 99_999) == []
    assert reader.read(100, start + 100_000) == [1]
    assert reader.read(100, start + 350_000) == [2, 3]


def test_a_delay_is_caught_up() -> None:
    reader = Generate(lambda i, random: i, rate=1_000.0).open(0, None)
    reader.read(100, 0)
    assert reader.read(100, 10_000_000) == list(range(1, 101))
    assert reader.read(100_000, 10_000_000) == list(range(101, 10_001))


@given(st.integers(1, 4), st.floats(0.5, 500), st.lists(st.integers(0, 3_000_000), max_size=12))
def test_the_rate_is_that_of_all_parts_and_moves_with_them(
    parts: int, rate: float, waits: list[int]
) -> None:
    source = Generate(lambda i, random: i, rate=rate, partitions=parts)
    now = 77
    positions: dict[int, Any] = dict.fromkeys(source.partitions())
    items: list[int] = []
    for wait in [0, *waits]:
        now += wait
        for part in source.partitions():
            reader = source.open(part, positions[part])
            read = reader.read(1_000_000, now)
            assert read is not None
            items += read
            positions[part] = reader.position
    assert sorted(items) == list(range(int((now - 77) * rate // 1_000_000) + 1))


def test_a_generator_may_be_endless() -> None:
    reader = Generate(lambda i, random: i).open(0, None)
    assert reader.read(3, 0) == [0, 1, 2]
    assert reader.read(3, 0) == [3, 4, 5]
    assert Generate(lambda i, random: i, count=0).open(0, None).read(3, 0) is None


def test_an_item_that_cannot_be_made_is_named() -> None:
    reader = Generate(lambda i, random: 1 // (i - 7), partitions=2).open(1, None)
    with pytest.raises(ZeroDivisionError) as caught:
        reader.read(10, 0)
    assert "was to make item 7" in caught.value.__notes__[0]
    assert reader.position == (1, None)


@pytest.mark.parametrize(
    "options",
    [{"rate": 0.0}, {"rate": -1.0}, {"count": -1}, {"partitions": 0}, {"rate": float("nan")}],
)
def test_generate_refuses_what_cannot_be(options: Any) -> None:
    with pytest.raises(ConnectorError, match="Generate"):
        Generate(lambda i, random: i, **options)
    with pytest.raises(ConnectorError, match="function of index and random"):
        Generate(3)  # type: ignore[arg-type]


# ---------------------------------------------------------------- Directory


def test_a_directory_lists_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.log", ".hidden.txt", "sub/d.txt", ".git/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert Directory(tmp_path).partitions() == ["a.txt", "b.txt", "c.log"]
    assert Directory(tmp_path, "*.txt").partitions() == ["a.txt", "b.txt"]
    assert Directory(tmp_path, "**/*.txt").partitions() == ["a.txt", "b.txt", "sub/d.txt"]
    assert read_all(Directory(tmp_path, "**/*.txt"), "sub/d.txt") == ["x"]


def test_a_relative_path_is_where_the_flow_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path)
    source = Directory("in")
    monkeypatch.chdir("/")
    assert source.partitions() == []


lines = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r")), max_size=12
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines, st.booleans(), st.sampled_from(["\n", "\r\n"]), st.integers(1, 40), st.data())
def test_lines_come_whole_whatever_is_read_at_once(
    tmp_path: Path, text: list[str], ended: bool, newline: str, block: int, data: st.DataObject
) -> None:
    path = tmp_path / "file"
    whole = newline.join([*text, ""]) if ended else newline.join(text)
    path.write_bytes(whole.encode())
    expected = whole.removeprefix("\ufeff").split(newline)
    if not expected[-1]:
        expected.pop()
    chance = data.draw(st.randoms())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "FIRST_READ_BYTES", block)
        patch.setattr(directory, "MIN_READ_BYTES", block)
        patch.setattr(directory, "MAX_READ_BYTES", block)
        source = Directory(tmp_path)
        assert read_all(source, "file", most=3) == expected
        assert read_moving(source, "file", lambda: chance.randint(1, 5)) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(min_size=0, max_size=9), max_size=12), st.integers(1, 20), st.booleans())
def test_a_growing_file_is_followed_line_by_line(
    tmp_path: Path, pieces: list[bytes], block: int, moving: bool
) -> None:
    path = tmp_path / "growing"
    path.write_bytes(b"")
    source = Directory(tmp_path, watch=True, encoding="latin-1")
    written = b""
    items: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "FIRST_READ_BYTES", block)
        patch.setattr(directory, "MIN_READ_BYTES", block)
        reader = source.open("growing", None)
        for piece in pieces:
            with path.open("ab") as file:
                file.write(piece)
            written += piece
            while read := reader.read(2, 0):
                items += read
                if moving:
                    reader = source.open("growing", reader.position)
            assert read == []
            complete = written[: written.rfind(b"\n") + 1].decode("latin-1").replace("\r\n", "\n")
            assert items == complete.split("\n")[:-1]
            assert reader.position == len(written[: written.rfind(b"\n") + 1])


def test_new_files_are_found_when_watching(tmp_path: Path) -> None:
    source = Directory(tmp_path, watch=True)
    assert not source.bounded
    assert Directory(tmp_path).bounded
    flow = Flow("test")
    flow.source(source, name="in").sink(Collect(), name="out")
    ran = Harness(flow)

    def poll() -> list[str]:
        reading = ran.stages[0].reading
        assert isinstance(reading, Reading)
        parts = list(source.partitions())
        if parts:
            reading.push(RowBatch.keyed(parts, parts))
        while reading.read(0):
            pass
        return ran.out.pop("out", [])

    assert poll() == []
    (tmp_path / "a").write_text("1\n2")
    assert poll() == ["1"]
    (tmp_path / "b").write_text("3\n")
    with (tmp_path / "a").open("a") as file:
        file.write("\n4\n")
    assert sorted(poll()) == ["2", "3", "4"]
    assert poll() == []


def test_lines_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    long = ["x" * 3_000_000, "y", "z" * 900_000]
    (tmp_path / "file").write_text("\n".join(long))
    assert read_all(Directory(tmp_path), "file") == long


def test_what_python_takes_for_line_ends_elsewhere_is_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("a\x0bb\x1cc\u2028d\re\n".encode())
    assert read_all(Directory(tmp_path), "file") == ["a\x0bb\x1cc\u2028d\re"]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("\ufeffa\n\ufeffb\n".encode())
    assert read_all(Directory(tmp_path), "file") == ["a", "\ufeffb"]
    (tmp_path / "file").write_bytes("\ufeff".encode())
    assert read_all(Directory(tmp_path), "file") == []
    (tmp_path / "file").write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    assert read_all(Directory(tmp_path, format="json"), "file") == [{"a": 1}]


def test_other_encodings(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("é\nü\n".encode("latin-1"))
    assert read_all(Directory(tmp_path, encoding="latin-1"), "file") == ["é", "ü"]
    for encoding, told in (
        ("utf-16", "finds lines by their newlines"),
        ("klingon", "unknown encoding"),
    ):
        with pytest.raises(ConnectorError, match=told):
            Directory(tmp_path, encoding=encoding)


def test_lines_of_json(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": 1}\n\n  \n[1, "ü"]\r\n3\nnull')
    assert read_all(Directory(tmp_path, format="json"), "file", most=2) == [
        {"a": 1},
        [1, "ü"],
        3,
        None,
    ]


def test_empty_lines_of_json_are_no_pause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1\n" + "\n" * 10_000 + "2\n\n\n")
    reader = Directory(tmp_path, format="json").open("file", None)
    assert [reader.read(1, 0) for _ in range(3)] == [[1], [2], None]
    reader = Directory(tmp_path, format="json", watch=True).open("file", None)
    assert [reader.read(5, 0) for _ in range(3)] == [[1], [2], []]


def test_a_line_that_is_not_json_is_named_by_its_byte(tmp_path: Path) -> None:
    good = '{"ü": 1}\n\n[1]\r\n'
    (tmp_path / "file").write_text(good + '{"a": \n[2]\n', newline="")
    with pytest.raises(ConnectorError, match="is not JSON: Expecting value") as caught:
        read_all(Directory(tmp_path, format="json"), "file")
    assert f"{tmp_path / 'file'}, byte {len(good.encode())}: the line '{{\"a\": '" in str(
        caught.value
    )
    for bad in ("1,2", "[1", "{}]", "nul", "[" * 100_000):
        (tmp_path / "file").write_text(f"1\n{bad}\n3]\n")
        with pytest.raises(ConnectorError, match="byte 2: "):
            read_all(Directory(tmp_path, format="json"), "file")


def test_bytes_that_are_no_text_are_named_by_their_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"good\nb\xffd\n")
    with pytest.raises(
        ConnectorError, match=r"file, byte 6: b'\\xffd\\n' is not utf-8: invalid start"
    ):
        read_all(Directory(tmp_path), "file")
    with pytest.raises(ConnectorError, match=r"byte 6: "):
        read_moving(Directory(tmp_path), "file", lambda: 1)


@pytest.mark.parametrize("watch", [True, False])
def test_a_file_that_shrinks_or_vanishes_is_an_error(tmp_path: Path, watch: bool) -> None:
    path = tmp_path / "file"
    path.write_text("one\ntwo\nthree\n")
    reader = Directory(tmp_path, watch=watch).open("file", None)
    assert reader.read(2, 0) == ["one", "two"]
    path.write_text("one\n")
    with pytest.raises(ConnectorError, match=r"file, byte 8: the file has shrunk to 4 bytes"):
        reader.read(2, 0)
    path.unlink()
    with pytest.raises(ConnectorError, match=r"file, byte 8: the file has vanished"):
        reader.read(2, 0)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConnectorError, match=r"there is no directory .*/nowhere"):
        Directory(tmp_path / "nowhere").partitions()
    with pytest.raises(ConnectorError, match="reads 'text' or 'json', not 'csv'"):
        Directory(tmp_path, format="csv")  # type: ignore[call-overload]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def test_many_files_need_no_more_than_a_few_at_a_time(tmp_path: Path) -> None:
    for n in range(300):
        (tmp_path / f"{n:03}").write_text(f"{n}\n" * 3)
    source = Directory(tmp_path)
    readers = [source.open(part, None) for part in source.partitions()]
    before = open_files()
    for reader in readers:
        reader.read(1, 0)
    assert open_files() < before + 200
    assert sum(len(reader.read(5, 0) or ()) for reader in readers) == 600


# ---------------------------------------------------------------- Files


def written(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.iterdir())}


def place(step: str = "out", worker: int = 0, generation: int = 0) -> Place:
    return Place("flow", step, worker, generation)


def test_files_are_one_for_each_worker_and_generation(tmp_path: Path) -> None:
    sink = Files(tmp_path / "a" / "b")
    for worker, generation in ((0, 0), (1, 0), (1, 2)):
        writer = sink.open(place("out", worker, generation))
        writer.write([worker, generation])
        writer.close()
        writer.close()
    assert written(tmp_path / "a" / "b") == {
        "part-out-0-0.jsonl": "0\n0\n",
        "part-out-1-0.jsonl": "1\n0\n",
        "part-out-1-2.jsonl": "1\n2\n",
    }


@dataclass
class Point:
    x: int
    inside: Any = None


def test_items_are_lines_of_json(tmp_path: Path) -> None:
    items = [{"a": "ü\n"}, [1, 2.5, None, True], (1, 2), "x", Point(1, Point(2)), "half \ud83d"]
    writer = Files(tmp_path).open(place())
    writer.write(items)
    writer.flush()
    text = (tmp_path / "part-out-0-0.jsonl").read_text()
    assert text.startswith('{"a":"ü\\n"}\n[1,2.5,null,true]\n')
    assert list(map(json.loads, text.splitlines())) == [
        *({"a": "ü\n"}, [1, 2.5, None, True], [1, 2], "x"),
        *({"x": 1, "inside": {"x": 2, "inside": None}}, "half \ud83d"),
    ]


def test_what_is_not_json_is_named_and_nothing_of_it_written(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    for bad in ({1, 2}, b"x", float("nan"), {"a": object()}, {(1, 2): 3}, loop):
        writer = Files(tmp_path).open(place("totals"))
        with pytest.raises(
            ConnectorError, match=rf"sink 'totals' cannot write the {type(bad).__name__} "
        ):
            writer.write([1, bad, 2])
        writer.close()
    assert written(tmp_path) == {"part-totals-0-0.jsonl": ""}


def test_dead_letters_are_written_whatever_they_are_about(tmp_path: Path) -> None:
    writer = Files(tmp_path).open(place("dead"))
    writer.write([DeadLetter("s", ("a", 1), {"plain": 1}, 5, "E", "T")])
    writer.write([DeadLetter("s", b"key", {1, 2}, 5, "E", "T")])
    writer.close()
    first, second = map(json.loads, (tmp_path / "part-dead-0-0.jsonl").read_text().splitlines())
    assert (first["key"], first["record"], first["time"]) == (["a", 1], {"plain": 1}, 5)
    assert (second["key"], second["record"], second["error"]) == ("b'key'", "{1, 2}", "E")


def test_items_are_lines_of_text(tmp_path: Path) -> None:
    writer = Files(tmp_path, "text").open(place())
    writer.write(["a", 1, None])
    with pytest.raises(ConnectorError, match="it has a newline in it; write it as JSON"):
        writer.write(["b\nc"])
    writer.close()
    assert written(tmp_path) == {"part-out-0-0.txt": "a\n1\nNone\n"}


def test_whole_lines_are_seen_at_once(tmp_path: Path) -> None:
    """Two writers of one file, as a sink in two stages has them."""
    sink = Files(tmp_path)
    first, second = sink.open(place()), sink.open(place())
    for n in range(2_000):
        first.write(["a" * 500, n])
        second.write(["b" * 500, n])
        if n % 100 == 0:
            text = (tmp_path / "part-out-0-0.jsonl").read_text()
            assert text == "" or text.endswith("\n")
            second.flush()
    first.close()
    second.close()
    found = list(map(json.loads, (tmp_path / "part-out-0-0.jsonl").read_text().splitlines()))
    assert len(found) == 8_000


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConnectorError, match=r"sink 'out' cannot write .*/file/part-out-0-0.jsonl"):
        Files(tmp_path / "file").open(place())
    with pytest.raises(ConnectorError, match="writes 'json' or 'text', not 'csv'"):
        Files(tmp_path, "csv")  # type: ignore[arg-type]


def test_what_files_wrote_a_directory_reads(tmp_path: Path) -> None:
    flow = Flow("write")
    source = flow.source(Generate(lambda i, random: {"i": i, "x": random.random()}, count=500))
    source.sink(Files(tmp_path))
    ran = Harness(flow).run()
    ran.stages[0].writing[0].writer.close()
    flow = Flow("read")
    flow.source(Directory(tmp_path, format="json")).sink(Collect(), name="out")
    assert [item["i"] for item in Harness(flow).run().out["out"]] == list(range(500))


# ---------------------------------------------------------------- Print


def test_print_writes_lines(capsys: pytest.CaptureFixture[str]) -> None:
    writer = Print().open(place())
    writer.write(["a", 1])
    writer.flush()
    assert capsys.readouterr().out == "a\n1\n"
    file = io.StringIO()
    Print(file, format=repr).open(place()).write(["a"])
    assert file.getvalue() == "'a'\n"
