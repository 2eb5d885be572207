"""`railgun backfill`, as it is typed: what makes no sense is told, and before Spark starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_cli import Terminal

from railgun import DONE
from railgun.cli.errors import NO_FLOW, USAGE

ONE = """
from railgun import Directory, Files, Flow
flow = Flow("one", dead_letters={letters})
orders = flow.source(Directory("orders", format="json", watch=True), name="orders")
orders.sink(Files("out"), name="out")
"""

TWO = """
from railgun import Collect, Directory, Files, Flow, Streams
flow = Flow("two")
old = flow.source(Directory("orders", format="json", watch=True), name="old")
new = flow.source(Streams("new", data="node"), name="new")
old.union(new).sink(Files("out"), name="out")
new.sink(Collect(), name="seen")
"""

STREAMS = """
from railgun import Files, Flow, Streams
flow = Flow("streams")
flow.source(Streams({names}, data="node"), name="orders").sink(Files("out"), name="out")
"""

PARQUET = ("--input", "parquet:history")
START = ("--at", "start")
BOTH = ("--input", "old=parquet:history", "--input", "new=source")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of one's own with flows in it, and no Spark."""

    def no_spark(*given: Any, **options: Any) -> None:
        raise AssertionError("Spark is started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr("railgun.spark.session.session", no_spark)
    (tmp_path / "b_one.py").write_text(ONE.format(letters=None))
    (tmp_path / "b_letters.py").write_text(ONE.format(letters='Files("letters")'))
    (tmp_path / "b_two.py").write_text(TWO)
    (tmp_path / "b_stream.py").write_text(STREAMS.format(names='"orders"'))
    (tmp_path / "b_streams.py").write_text(STREAMS.format(names='"orders", "returns"'))
    (tmp_path / "b_pattern.py").write_text(STREAMS.format(names='"orders.*"'))
    yield tmp_path
    for name in [name for name in sys.modules if name.removeprefix("railgun_flow_")[:2] == "b_"]:
        del sys.modules[name]


@pytest.fixture
def terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(folder / "jobs", capsys)


def refused(terminal: Terminal, flow: str, *words: str) -> str:
    """What is told, which is all that is told."""
    assert terminal.type("backfill", f"b_{flow}.py", *words) == USAGE, terminal.err
    assert terminal.out == ""
    assert terminal.err.startswith("railgun: ")
    assert terminal.err.count("\n") == 1
    return terminal.err.removeprefix("railgun: ").removesuffix("\n")


# ---------------------------------------------------------------- --input


def test_a_source_without_input(terminal: Terminal) -> None:
    assert refused(terminal, "one") == (
        "source 'orders' has no input: --input orders=parquet:PATH, or --input orders=source to read the source itself"
    )
    assert refused(terminal, "two", "--input", "old=source") == (
        "source 'new' has no input: --input new=parquet:PATH, or --input new=source to read the source itself"
    )


def test_an_unknown_source(terminal: Terminal) -> None:
    only = ": the flow has no source 'ordesr', only"
    assert refused(terminal, "one", "--input", "ordesr=source") == f"--input{only} orders"
    assert refused(terminal, "two", "--input", "ordesr=source") == f"--input{only} old, new"
    assert (
        refused(terminal, "one", *PARQUET, "--order-by", "ordesr=day") == f"--order-by{only} orders"
    )


def test_a_source_given_twice(terminal: Terminal) -> None:
    twice = "source 'orders' is given twice"
    assert refused(terminal, "one", *PARQUET, "--input", "orders=source") == f"--input: {twice}"
    order = ("--order-by", "day", "--order-by", "orders=at")
    assert refused(terminal, "one", *PARQUET, *order) == f"--order-by: {twice}"


@pytest.mark.parametrize("told", ["history", "parquet:", ":history", "", "Source"])
def test_an_input_that_is_no_format_and_path(terminal: Terminal, told: str) -> None:
    wanted = f"--input takes FORMAT:PATH, as parquet:history/, or source, not {told!r}"
    assert refused(terminal, "one", "--input", told) == wanted
    assert refused(terminal, "one", "--input", f"orders={told}") == wanted


def test_a_path_may_have_an_equals_sign(terminal: Terminal) -> None:
    told = refused(terminal, "one", "--input", "parquet:history/year=2024")
    assert told.startswith("where does source 'orders' continue live, after its table?")


def test_a_flow_with_two_sources_has_them_named(terminal: Terminal) -> None:
    assert refused(terminal, "two", "--input", "parquet:history") == (
        "--input of which source? --input NAME=parquet:history; there are old, new"
    )
    assert refused(terminal, "two", *BOTH, "--order-by", "day") == (
        "--order-by of which source? --order-by NAME=day; there are old, new"
    )
    assert refused(terminal, "two", *BOTH, "--at", "start") == (
        "--at of which source? --at NAME:start; there are old, new"
    )


# ---------------------------------------------------------------- --at and --order-by


@pytest.mark.parametrize(
    ("flow", "source", "words"), [("one", "orders", PARQUET), ("two", "old", BOTH)]
)
def test_a_table_does_not_say_where_its_source_goes_on(
    terminal: Terminal, flow: str, source: str, words: tuple[str, ...]
) -> None:
    assert refused(terminal, flow, *words) == (
        f"where does source '{source}' continue live, after its table? --at {source}:PART=POSITION (of a stream: "
        f"its name and an offset; of a file: its name and done), or --at {source}:start if the table has none of its "
        "data"
    )


def test_a_position_of_which_part(terminal: Terminal) -> None:
    wanted = "of which part of source 'orders'? --at orders:PART=7"
    for flow in ("one", "streams", "pattern"):
        assert refused(terminal, flow, *PARQUET, "--at", "7") == f"--at 7: {wanted}"
        assert refused(terminal, flow, *PARQUET, "--at", "orders:7") == f"--at 7: {wanted}"


@pytest.mark.parametrize("told", ["seven", "", "1.5.2", "{7"])
def test_a_bad_position(terminal: Terminal, told: str) -> None:
    wanted = f"--at: a position is a number, done, end or JSON, not {told!r}"
    assert refused(terminal, "one", *PARQUET, "--at", f"a.jsonl={told}") == wanted
    assert refused(terminal, "one", *PARQUET, "--at", f"orders:a=b.jsonl={told}") == wanted
    assert refused(terminal, "stream", *PARQUET, "--at", told) == wanted


def test_a_part_given_twice(terminal: Terminal) -> None:
    words = ("--at", "a.jsonl=done", "--at", "orders:a.jsonl=7")
    assert refused(terminal, "one", *PARQUET, *words) == (
        "--at: part 'a.jsonl' of source 'orders' is given twice"
    )


def test_a_stream_of_another_name(terminal: Terminal) -> None:
    assert refused(terminal, "streams", *PARQUET, "--at", "order=7") == (
        "--at: source 'orders' has no part 'order', only orders, returns"
    )


def test_the_end_of_what_has_none(terminal: Terminal, folder: Path) -> None:
    (folder / "orders").mkdir()
    (folder / "orders" / "a.jsonl").write_text("1\n")
    assert refused(terminal, "one", *PARQUET, "--at", "a.jsonl=end") == (
        "--at: source 'orders' does not know where 'a.jsonl' ends"
    )


def test_a_source_that_is_read_itself_has_its_own_order_and_positions(terminal: Terminal) -> None:
    own = "=source reads the source itself, in its own order and positions: leave out --order-by and --at"
    for words in (("--at", "start"), ("--at", "a.jsonl=done"), ("--order-by", "day")):
        assert refused(terminal, "one", "--input", "source", *words) == f"--input orders{own}"
    both = (*BOTH, "--at", "old:start", "--at", "new:7")
    assert refused(terminal, "two", *both) == f"--input new{own}"


@pytest.mark.parametrize(
    ("flow", "words", "wanted"),
    [
        ("one", ["start"], {"orders": {}}),
        ("one", ["orders:start"], {"orders": {}}),
        ("one", ["a.jsonl=done", "b/c.jsonl=120"], {"orders": {"a.jsonl": DONE, "b/c.jsonl": 120}}),
        ("one", ["orders:a=b:c.jsonl=done"], {"orders": {"a=b:c.jsonl": DONE}}),
        ("stream", ["7"], {"orders": {"orders": 7}}),
        ("stream", ["orders=7"], {"orders": {"orders": 7}}),
        ("stream", ["orders:7"], {"orders": {"orders": 7}}),
        ("stream", ["orders:orders=7"], {"orders": {"orders": 7}}),
        ("streams", ["orders=7", "returns=done"], {"orders": {"orders": 7, "returns": DONE}}),
        ("pattern", ["orders.eu=7"], {"orders": {"orders.eu": 7}}),
    ],
)
def test_positions_as_they_are_typed(
    terminal: Terminal, flow: str, words: list[str], wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def ran(options: Any, out: Any, loaded: Any, *rest: Any) -> int:
        taken.append(rest)
        return 0

    monkeypatch.setattr("railgun.cli.commands.backfill._run", ran)
    at = [word for told in words for word in ("--at", told)]
    more = ("--order-by", "day", "--output", "json:totals")
    assert terminal.type("backfill", f"b_{flow}.py", *PARQUET, *at, *more) == 0, terminal.err
    [(inputs, order, positions, outputs)] = taken
    assert inputs == {"orders": ("parquet", "history")}
    assert order == {"orders": "day"}
    assert positions == wanted
    assert outputs == {"out": ("json", "totals")}


# ---------------------------------------------------------------- --output and others


def test_a_sink_given_twice(terminal: Terminal) -> None:
    words = (*PARQUET, *START, "--output", "parquet:a", "--output", "out=parquet:b")
    assert refused(terminal, "one", *words) == "--output: sink 'out' is given twice"


def test_an_unknown_sink(terminal: Terminal) -> None:
    words = (*PARQUET, *START, "--output")
    assert refused(terminal, "one", *words, "uot=parquet:a") == (
        "--output: the flow has no sink 'uot', only out"
    )
    assert refused(terminal, "letters", *words, "parquet:a") == (
        "--output of which sink? --output NAME=parquet:a; there are out, dead_letters"
    )


@pytest.mark.parametrize("told", ["totals", "parquet:", "out=parquet", "out=:totals"])
def test_an_output_that_is_no_format_and_path(terminal: Terminal, told: str) -> None:
    assert refused(terminal, "one", *PARQUET, *START, "--output", told) == (
        f"--output takes [SINK=]FORMAT:PATH, as parquet:totals/, not {told!r}"
    )


def test_other_options_that_make_no_sense(terminal: Terminal) -> None:
    words = (*PARQUET, *START)
    assert (
        refused(terminal, "one", *words, "--set", "cores") == "--set takes name=value, not 'cores'"
    )
    assert refused(terminal, "one", *words, "--partitions", "0").startswith(
        "argument --partitions: "
    )


def test_a_flow_that_is_not_there(terminal: Terminal) -> None:
    assert terminal.type("backfill", "nowhere.py", *PARQUET, *START) == NO_FLOW
    assert terminal.err == "railgun: there is no file nowhere.py\n"


def test_programs_get_it_as_json(terminal: Terminal) -> None:
    code, [told] = terminal.json("backfill", "b_one.py", "--input", "history")
    assert code == USAGE
    assert told["error"]["kind"] == "usage"
    assert told["error"]["message"].startswith("--input takes FORMAT:PATH")
