"""The programs in docs/connectors.md run, as they stand there."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path

import pytest
from tests.ingest.acting_worker import SECRET, acted, client, worker

from railgun.ingest.find_flow import Endpoints, Flow, addresses_of

PAGE = Path(__file__).parents[2] / "docs" / "connectors.md"
BLOCKS = [
    block
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    if "…" not in block  # is of something left out
]


def test_there_are_programs() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[0])
def test_a_program_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log.txt").write_bytes(b"one\ntwo\n")
    monkeypatch.chdir(tmp_path)
    code = compile(block, PAGE.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def main() -> None:
        async with worker() as (made, where), client(where) as c:

            async def find(flow: Flow) -> Endpoints:
                return Endpoints(addresses_of(where), SECRET)

            monkeypatch.setattr(Flow, "find", find)
            scope = {"c": c}
            if code.co_flags & inspect.CO_COROUTINE:
                await eval(code, scope)
            else:
                await asyncio.to_thread(exec, code, scope)
            if "log.txt" in block:
                assert made.came["log.txt"] == [(0, b"one"), (4, b"two")]

    acted(main())
