"""The benchmarks are called by name, by people and by programs: both must find what they expect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_a_name_the_benchmarks_are_listed_with_what_they_measure() -> None:
    ran = bench()
    assert ran.returncode == 0
    listed = [line.split(maxsplit=1) for line in ran.stdout.splitlines() if line.startswith("  ")]
    told = dict(listed)
    assert told["placement"].startswith("What it costs to find the owner of a key")
    assert set(told) == {path.stem for path in (ROOT / "bench").glob("[!_]*.py")}


def test_an_unknown_name_is_an_error_that_tells_the_known_ones() -> None:
    ran = bench("plaecment", "--json")
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "no benchmark 'plaecment'" in ran.stderr
    assert "placement" in ran.stderr


@pytest.mark.parametrize("name", ["__main__", "../run", "bench.placement", ""])
def test_what_is_not_a_benchmark_is_not_run(name: str) -> None:
    assert bench(name).returncode == 2


def test_the_last_line_is_the_report_as_json() -> None:
    ran = bench("placement", "--quick", "--json")
    report = json.loads(ran.stdout.splitlines()[-1])
    assert set(report) == {"name", "pass", "checks"}
    assert report["name"] == "placement"
    assert report["checks"]
    for check in report["checks"]:
        assert set(check) == {"name", "value", "unit", "goal", "pass"}
        assert check["value"] > 0
    # How fast this machine is just now is not for this test to judge; that the verdicts agree is.
    assert report["pass"] == all(check["pass"] for check in report["checks"])
    assert ran.returncode == (0 if report["pass"] else 1)
    assert [check["name"] for check in report["checks"] if check["goal"]] == ["str to owner"]


def test_without_json_the_report_is_a_table_for_people() -> None:
    ran = bench("placement", "--quick")
    assert "str to owner" in ran.stdout
    assert ran.stdout.splitlines()[-1] in {"pass", "FAIL"}
