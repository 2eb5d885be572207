"""The check of names and prose: each rule finds bad examples, and leaves good ones alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from verification.style import against_debt, check_text, lowered, read_debt, write_debt

from verification import style


def rules(text: str) -> list[str]:
    return [finding.rule for finding in check_text(text)]


@pytest.mark.parametrize(
    "docstring",
    [
        "What a line says of the node.",
        "Who is there, and since when.",
        "All of them, one after the other.",
        "The lines of a file, without their ends.",
        "A client of the node that is named.",
        "Whether the node is still there, or not.",
        "How far the group is, in messages.",
        "Leave it.",
        "Ask.",
        "Follow two files.",
    ],
)
def test_a_docstring_without_a_verb_or_with_three_words_is_found(docstring: str) -> None:
    assert rules(f'def work():\n    """{docstring}"""') == ["docstring"]
    assert rules(f'class Log:\n    async def work(self):\n        """{docstring}"""') == [
        "docstring"
    ]


def test_a_docstring_that_only_repeats_the_name_is_found() -> None:
    assert rules('def read_the_old_format():\n    """Read the old format."""') == ["docstring"]
    assert rules('def read_the_old_format():\n    """Read snapshots of version 1."""') == []


@pytest.mark.parametrize(
    "text",
    [
        'def work():\n    """Return the lines of a file, without their ends."""',
        'def delete_all_expired_records():\n    """Delete old records."""',
        'def _work():\n    """What is left."""',
        'class _Private:\n    def work(self):\n        """What is left."""',
        'class Log:\n    @property\n    def end(self):\n        """The next offset."""',
        'class Log:\n    @functools.cached_property\n    def end(self):\n        """The end."""',
        'class Log:\n    @end.setter\n    def end(self, end):\n        """The end."""',
        'class Log:\n    def __len__(self):\n        """The count."""',
        '@typing.overload\ndef work():\n    """The first."""',
        'class Log:\n    """The log of one stream."""',
        'def work():\n    """Return a function that counts."""\n    def inner():\n        """What."""',
        "def work():\n    pass",
    ],
)
def test_good_docstrings_and_those_of_private_things_are_left_alone(text: str) -> None:
    assert rules(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "PATIENCE = 10.0  # seconds",
        "PATIENCE: Final = 10.0  # how long to wait, in seconds",
        "# Seconds between two looks,\n# while nothing happens: 2 s are 2000 ms.\nLOOK: Final = 2",
        'LARGEST: Final = 16 << 20\n"""Bytes of a frame."""',
        "_PIECE = 4 * 1024  # bytes",
        "LEAST = -5  # µs",
        "WINDOW: Final = 1000  # messages that are read ahead",
        'AHEAD = 2 * OTHER\n"""Number of records that are prefetched."""',
        "class Reader:\n    CALM: ClassVar[float] = 0.5  # seconds",
        "BIG = (\n    1 << 30\n)  # bytes",
    ],
)
def test_a_unit_beside_a_constant_instead_of_in_its_name_is_found(text: str) -> None:
    assert rules(text) == ["unit"]


@pytest.mark.parametrize(
    "text",
    [
        "RETRY_PAUSE_S = 10.0  # seconds between two attempts",
        "MAX_FRAME_BYTES: Final = 16 << 20\n'''Bytes of a frame.'''",
        "READ_AHEAD_MESSAGES = 1000  # messages",
        "RATIO = 0.5  # of the memory",
        "VERSION = 3  # messages have IDs since then",
        "PAUSE_DIVISOR = 8  # keys for each pause",
        "ROUNDS = 3  # as often as messages may be lost",
        "NAME = 'x'  # 20 bytes",
        "PAUSES = (1.0, 2.0)  # seconds",
        "VERBOSE = True  # a line for all messages",
        "pause = 2.0  # seconds",
        "FIRST = 1\nPAUSE_S = 2.0  # seconds",
        "PAUSE_S = 2.0  # seconds\nSECOND = 1",
        "HALF = END / START  # of the seconds",
    ],
)
def test_constants_with_a_unit_in_the_name_or_without_one_are_left_alone(text: str) -> None:
    assert rules(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "told = 1",
        "def work():\n    found: int = 1",
        "for one in lines: pass",
        "a = [one for one in lines]",
        "if (given := read()): pass",
        "first, *other = lines",
        "with open(path) as thing: pass",
        "made += 1",
        "match value:\n    case [known]: pass",
        "try: pass\nexcept ValueError as said: pass",
    ],
)
def test_a_vague_variable_is_found(text: str) -> None:
    assert rules(text) == ["vague-name"]


@pytest.mark.parametrize(
    "text",
    ["status = told", "log.found = 1", "class Entry:\n    known: bool = False", "work(one=1)"],
)
def test_uses_attributes_fields_and_keywords_are_left_alone(text: str) -> None:
    assert rules(text) == []


def test_findings_name_the_line_and_are_ordered() -> None:
    text = 'PAUSE = 1.0  # seconds\n\n\ndef work():\n    """What is left."""\n    one = 1\n'
    assert [(finding.line, finding.rule) for finding in check_text(text)] == [
        (1, "unit"), (5, "docstring"), (6, "vague-name"),
    ]  # fmt: skip
    assert str(check_text(text)[0]) == "text.py:1: unit: PAUSE is in seconds: say so in the name"


def test_paths_are_checked_without_a_debt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text('"""Good."""\n')
    assert style.main([str(tmp_path)]) == 0
    (tmp_path / "bad.py").write_text("told = 1\n")
    (tmp_path / "made_pb2.py").write_text("told = 1\n")
    assert style.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/bad.py:1: vague-name: variable 'told' does not say what it is"
    ]


def test_more_findings_than_the_debt_fail_and_fewer_lower_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, debt = tmp_path / "railgun", tmp_path / "debt.txt"
    (code / "cli" / "commands").mkdir(parents=True)
    module = code / "cli" / "commands" / "run.py"
    monkeypatch.setattr(style, "ROOT", tmp_path)
    monkeypatch.setattr(style, "CHECKED", code)
    monkeypatch.setattr(style, "DEBT", debt)
    module.write_text("told = 1\nfound = 2\n")
    assert style.main([]) == 1
    assert style.main(["--write"]) == 0
    assert read_debt(debt.read_text()) == {("railgun.cli", "vague-name"): 2}
    assert style.main([]) == 0

    module.write_text("told = 1\nfound = 2\none = 3\n")
    assert style.main([]) == 1
    assert style.main(["--write"]) == 1
    out = capsys.readouterr().out
    assert "railgun.cli: 3 findings of vague-name, and 2 are allowed" in out
    assert "railgun/cli/commands/run.py:3: vague-name" in out

    module.write_text("told = 1\n")
    assert style.main([]) == 0
    assert "1 findings fewer than debt.txt allows" in capsys.readouterr().out
    assert style.main(["--write"]) == 0
    assert read_debt(debt.read_text()) == {("railgun.cli", "vague-name"): 1}
    (code / "new.py").write_text("PAUSE = 1.0  # seconds\n")
    assert style.main([]) == 1


def test_a_debt_is_read_as_it_is_written_and_never_rises() -> None:
    counts = {
        ("railgun.cli", "unit"): 2,
        ("railgun", "docstring"): 1,
        ("railgun.client", "unit"): 0,
    }
    assert read_debt(write_debt(counts)) == {key: n for key, n in counts.items() if n}
    assert lowered({("a", "unit"): 1}, {("a", "unit"): 2, ("b", "unit"): 1}) == {("a", "unit"): 1}


def test_the_code_of_the_project_has_no_more_findings_than_allowed() -> None:
    findings = style.check_paths([style.CHECKED])
    assert against_debt(findings, read_debt(style.DEBT.read_text()), style.CHECKED) == []


def test_the_check_is_good_by_its_own_rules() -> None:
    assert style.check_paths([Path(style.__file__)]) == []
