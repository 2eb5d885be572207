"""The benchmarks are called by name, by people and by programs: both must find what they expect."""

from __future__ import annotations

import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from railgun.testing.report import Report

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


@pytest.mark.parametrize(
    "name",
    ["bench._workload", "bench.throughput", "bench._outage", "bench._recovering", "bench.recovery"],
)
def test_the_examples_in_the_benchmarks_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted
    assert not results.failed


def test_the_limit_sums_every_record_once_whatever_the_size_of_batches() -> None:
    # That nothing is lost or doubled between the processes is checked by `limit` itself. Batches
    # of 200,000 are far more than a socket takes at once: both processes have to read while they write.
    for size in (7, 1_000, 200_000):
        program = f"from bench.limit import limit; r = limit({size}, seconds=0.3, warm_up=0.1)"
        program = f"if __name__ == '__main__':\n    {program}\n    print(r.as_line())"
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 0, ran.stderr
        told = json.loads(ran.stdout)
        assert told["records_per_second"] > 0
        assert told["processor_ns"] > 0


def test_a_peer_that_does_not_run_is_a_failed_check_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    throughput = importlib.import_module("bench.throughput")
    peers = importlib.import_module("bench._peers")
    workload = importlib.import_module("bench._workload")
    asked: list[str] = []

    def broken(seconds: float) -> object:
        asked.append("broken")
        raise peers.PeerError("there is no such wheel")

    def sound(seconds: float) -> object:
        asked.append("sound")
        return workload.Rate(1_000.0 * len(asked), 500.0 / len(asked), "sound 1.0")

    report = Report("throughput")
    runners = {"broken": broken, "sound": sound}
    best = throughput.measure(runners, 2, 0.1, report, Console(stderr=True))
    assert asked == ["broken", "sound", "sound"]
    assert best == {"sound": workload.Rate(3_000.0, 500.0 / 3, "sound 1.0")}
    assert [(check.name, check.passed) for check in report.checks] == [("broken", False)]
    throughput.ratio(report, best, "sound", "broken", at_least=2)
    assert (report.checks[-1].value, report.checks[-1].passed) == ("not measured", False)
