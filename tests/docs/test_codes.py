"""docs/design/wire.md lists every code, and says which of them may pass."""

from __future__ import annotations

import re
from pathlib import Path

from railgun.transport.error_codes import CODES

PAGE = (Path(__file__).parents[2] / "docs" / "design" / "wire.md").read_text()
BEFORE, TABLE = PAGE.split("\n## Codes\n")[1].split("\n| code |", 1)


def codes_in(text: str) -> list[str]:
    return re.findall(r"`([A-Z][A-Z_]+)`", text)


def test_every_code_stands_in_the_table_once() -> None:
    rows = [line.split("|")[1] for line in TABLE.splitlines() if line.startswith("| `")]
    listed = [code for row in rows for code in codes_in(row)]
    assert sorted(listed) == sorted(CODES)


def test_the_codes_that_may_pass_are_told() -> None:
    nothing_done, in_doubt = BEFORE.split("Those that may pass:")[1].split("(nothing was done)")
    passing = {code for code, told in CODES.items() if told.passes}
    assert set(codes_in(nothing_done)) == {code for code in passing if CODES[code].nothing_done}
    assert set(codes_in(in_doubt)) == {code for code in passing if not CODES[code].nothing_done}
