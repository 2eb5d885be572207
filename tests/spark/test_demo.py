"""The demo, run as a user runs it: it passes, it is quiet but for its own words, and leaves a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SPARK_NOISE = ("WARN", "Setting default log level", "Using Spark's default", "incubator", "Stage 0")


@pytest.mark.spark
def test_the_demo_passes_and_leaves_a_picture(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "verification.demo", "--quick", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr

    report = json.loads(run.stdout.splitlines()[-1])
    assert report["name"] == "demo"
    assert report["pass"] is True
    values = {check["name"]: check["value"] for check in report["checks"]}
    assert values["lost"] == values["doubled"] == values["reordered"] == values["restarts"] == 0
    assert values["2 → 4, keys moved"] > 0
    assert values["4 → 1, keys moved"] > 0
    assert values["streams: totals of all orders"] == 10_000
    assert values["streams: customers with a wrong sum"] == 0
    assert {"name", "value", "unit", "goal", "pass"} == set(report["checks"][0])

    assert not [word for word in SPARK_NOISE if word in run.stderr + run.stdout]
    assert "every one there once, in order" in " ".join(run.stderr.split())
    assert "railgun scale wordcount 4 --watch" in " ".join(run.stderr.split())

    assert [path.name for path in tmp_path.iterdir()] == ["railgun-demo.svg"]
    picture = ElementTree.parse(tmp_path / "railgun-demo.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
