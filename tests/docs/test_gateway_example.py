"""The example of a gateway: its program feeds its flow, and each reading comes out once."""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path

import pytest
from tests.ingest.ready_connectors import DEADLINE

from railgun import run
from railgun.engine.controller.storekeeper import Snapshots
from railgun.testing.local_workers import SubprocessLauncher

EXAMPLE = Path(__file__).parents[2] / "examples" / "gateway.py"


def test_the_gateway_feeds_its_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAILGUN_JOBS", str(tmp_path / "jobs"))
    example = runpy.run_path(str(EXAMPLE))
    feed = example["feed"]
    feed.__globals__.update(READINGS=50)
    launcher = SubprocessLauncher()
    with run(example["flow"], 1, launcher=launcher, snapshots=Snapshots("snapshots", every=0.2)):
        for _ in range(2):  # once more, it finds that all is there
            asyncio.run(asyncio.wait_for(feed(), DEADLINE))
    parts = (tmp_path / "gateway-output").glob("part-*.jsonl")
    rows = [json.loads(line) for part in parts for line in part.read_text("utf-8").splitlines()]
    seen = sorted((sensor, number) for sensor, number, _ in rows)
    assert seen == [(f"sensor-{n}", number) for n in range(5) for number in range(50)]
