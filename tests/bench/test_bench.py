"""The benchmarks are called by name, by people and by programs: both must find what they expect."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from verification.report import Report

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str, patience: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience,
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
    [
        *("bench._workload", "bench.throughput", "bench._outage", "bench._recovering"),
        *("bench.recovery", "bench.streams", "bench.datasource", "bench._sections", "bench.jepsen"),
    ],
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
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600
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


# ---------------------------------------------------------------- streams


def nothing_is_left() -> None:
    """What a bench has made is gone; others may be at work beside it, and what they make goes, too."""
    end = time.monotonic() + 300
    while list(ROOT.glob("railgun-bench-*")):
        assert time.monotonic() < end, "a bench has left its files"
        time.sleep(0.2)


def test_streams_are_measured_without_peers_and_the_report_has_every_line() -> None:
    ran = bench(
        *("streams", "--quick", "--json", "--ours"),
        *("--only", "publish,consume,pubsub,request,single,limit"),
    )
    assert ran.stdout, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert ran.returncode == (0 if report["pass"] else 1)
    checks = {check["name"]: check for check in report["checks"]}
    assert all(check["value"] > 0 for check in checks.values())
    assert {name.partition(",")[0] for name in checks} == {
        *("publish", "consume", "pubsub", "request", "single", "limit")
    }
    # Without peers only the bare writes are there to be compared with.
    assert {name for name, check in checks.items() if check["goal"]} == {
        "single, awaited / bare",
        "limit, 8 at once / a sync for each",
        "limit, 8 at once / a sync for 4",
    }
    nothing_is_left()


def test_what_streams_does_not_know_is_refused_with_what_it_knows() -> None:
    ran = bench("streams", "--only", "publish,dreams")
    assert ran.returncode == 2
    assert "dreams: not among publish, consume" in ran.stderr


@pytest.mark.parametrize(
    ("work", "count", "figures"),
    [
        ("through", 20_000, {"rate", "second", "last", "all"}),
        ("unacked", 1_000, {"delivered", "alone", "peak", "machine, alone", "machine, peak"}),
        ("many", 25, {"made", "worked", "bytes"}),
    ],
)
def test_the_node_is_measured_from_a_process_of_its_own(
    work: str, count: int, figures: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    streams = importlib.import_module("bench.streams")
    servers = importlib.import_module("bench._servers")
    run = streams.Bench(tmp_path, streams.QUICK, Report("streams"), Console(stderr=True))
    with servers.ours(tmp_path / "node") as server:
        found = run.ask(work, server, count)
    assert figures <= set(found)
    assert found.get("right", count) == count  # all streams have brought all
    assert found.get("left", 0) == 0  # all is acked
    with pytest.raises(ProcessLookupError):
        os.kill(server.process, 0)


def test_a_server_ends_with_what_it_was_needed_for_also_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    servers = importlib.import_module("bench._servers")
    found = []

    def use() -> None:
        with servers.ours(tmp_path / "node") as server:
            found.append(server.process)
            raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        use()
    with pytest.raises(ProcessLookupError):
        os.kill(found[0], 0)
    peers = importlib.import_module("bench._peers")
    (tmp_path / "secret").write_text("no secret")  # it cannot start
    with (
        pytest.raises(peers.PeerError, match="ended at its start"),
        servers.ours(tmp_path),
    ):
        pass


def test_a_peer_that_is_left_out_is_told_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    streams = importlib.import_module("bench.streams")
    peers = importlib.import_module("bench._peers")
    asked: list[str] = []

    def turn(self: object, name: str, work: str) -> dict[str, float]:
        asked.append(name)
        if name == "Redis":
            raise peers.PeerError("there is no redis-server here")
        return {"batches of 1,000": 3e6, "batches of 100": 2e6, "1,000 tasks": 1e5 * len(asked)}

    monkeypatch.setattr(streams.Bench, "turn", turn)
    report = Report("streams")
    run = streams.Bench(tmp_path, streams.Size(rounds=2), report, Console(stderr=True))
    run.publish()
    assert asked == ["Railgun", "NATS", "Redis", "Railgun", "NATS"]
    checks = {check.name: check for check in report.checks}
    assert len(checks) == len(report.checks)
    assert (checks["Redis"].value, checks["Redis"].passed) == ("left out", False)
    assert checks["publish, 1,000 tasks / Redis"].value == "not measured"
    found = checks["publish, 1,000 tasks / NATS"]
    assert (found.value, found.unit) == (0.08, "times (0.03 to 0.13)")
    assert (found.goal, found.passed) == (">= 10 times", False)


# ---------------------------------------------------------------- cluster


def test_a_cluster_is_measured_without_peers_and_the_report_has_every_line() -> None:
    only = "publish,single,metadata"
    ran = bench("cluster", "--quick", "--json", "--ours", "--only", only, patience=180)
    assert ran.stdout, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert ran.returncode == (0 if report["pass"] else 1)
    checks = {check["name"]: check for check in report["checks"]}
    assert {name.partition(",")[0] for name in checks} == {"publish", "single", "metadata"}
    assert {name for name, check in checks.items() if check["goal"]} == {
        "publish, acks=quorum, batches of 1,000",
        "publish, other leaders or masters meanwhile",
        "metadata, a new stream, at the leader, p50",
        "metadata, a new stream, through another node, p50",
    }
    assert all(check["value"] > 0 for name, check in checks.items() if "meanwhile" not in name)
    nothing_is_left()


def test_a_cluster_is_measured_while_masters_go_and_replicas_come_back() -> None:
    only = "failover,catch-up"
    ran = bench("cluster", "--quick", "--json", "--ours", "--only", only, patience=180)
    assert ran.stdout, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert ran.returncode == (0 if report["pass"] else 1)
    checks = {check["name"]: check for check in report["checks"]}
    assert any(name.startswith("failover, kill -9, ") for name in checks)
    assert checks["failover, SIGSTOP, 1 time"]["value"] > 0
    assert checks["catch-up / bare"]["value"] > 0
    assert checks["catch-up, other leaders or masters meanwhile"]["value"] == 0
    nothing_is_left()


def test_what_the_cluster_benchmark_does_not_know_is_refused_with_what_it_knows() -> None:
    ran = bench("cluster", "--only", "publish,dreams")
    assert ran.returncode == 2
    assert "dreams: not among publish, single" in ran.stderr
