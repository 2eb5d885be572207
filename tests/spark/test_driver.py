"""The driver's process: what Ctrl-C does to it, and what becomes of workers when it is no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.spark.workers import Desk, eventually, is_alive

from railgun.spark.session import interrupts

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, signal, sys, threading
from pathlib import Path
from railgun.spark.launcher import SparkLauncher
from railgun.spark.session import interrupts, session
from tests.spark.workers import Desk, Endings, waits

desk, ended, draining = Desk(Path(sys.argv[1])), Endings(), threading.Event()
before = signal.getsignal(signal.SIGINT)
spark = session("driver", quick=True)
assert signal.getsignal(signal.SIGINT) is before, "PySpark's handler would cancel all jobs"
launcher = SparkLauncher(spark, workers=2, entry=waits())
specs = [desk.spec(number, job="driver") for number in range(2)]
for spec in specs:
    launcher.launch(spec, ended)
for spec in specs:
    desk.pid(spec)
lost = desk.spec(2, job="driver")
launcher.launch(lost, ended)
os.kill(desk.pid(lost), signal.SIGKILL)
assert ended.next()[0] == lost
with interrupts(draining.set):
    print("running", flush=True)
    draining.wait()
    assert ended.none_left, "Ctrl-C has ended nobody"
    print("draining", flush=True)
    desk.dismiss_all()
    print(sorted(error or "ended" for _, error in (ended.next(), ended.next())), flush=True)
    (desk.path / "all.go").unlink()
    last = desk.spec(3, job="driver")
    launcher.launch(last, ended)
    desk.pid(last)
    spark.stop()
    print(ended.next()[1], flush=True)
    launcher.launch(desk.spec(4, job="driver"), ended)
    print(ended.next()[1], flush=True)
"""

ON_A_SESSION_OF_THE_USER = """
import os, signal, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from railgun.spark.launcher import SparkLauncher
from railgun.spark.session import opened
from tests.spark.workers import Desk, Endings, is_alive, waits

desk, ended = Desk(Path(sys.argv[1])), Endings()
spark = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").getOrCreate()
with opened("mine", workers=3) as used:
    assert used is spark
    launcher = SparkLauncher(used, entry=waits())
    specs = [desk.spec(number, job="driver") for number in range(3)]
    for spec in specs:
        launcher.launch(spec, ended)
    pids = [desk.pid(spec) for spec in specs]
    os.kill(pids[2], signal.SIGSTOP)
    launcher.cancel(specs[2])
    assert ended.next() == (specs[2], "it was cancelled")
    assert not is_alive(pids[2]), "its status lags behind; it is gone all the same"
assert spark.range(3).count() == 3, "it is not ours to stop"
print("running", flush=True)
time.sleep(600)
"""


TWICE = """
import json, sys, threading, time, urllib.request
from pathlib import Path
from pyspark import SparkContext
from railgun import Collect, Flow, Generate, run
from railgun.transport.registry import Registry

here = Path(sys.argv[1])
registry = Registry(here / "jobs")

def flow():
    made = Flow("cell")
    made.source(Generate(lambda index, chance: index, rate=1000), name="numbers").sink(Collect(), name="out")
    return made

def ask(entry, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {entry.token}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(entry.url + path, data, headers), timeout=60) as answer:
        return json.load(answer)

def look():
    while (entry := registry.find("cell")) is None:
        time.sleep(0.01)
    before = SparkContext._active_spark_context is None
    print(ask(entry, "/status")["state"], "before Spark" if before else "too late", flush=True)
    ask(entry, "/scale", {"workers": 3})

def runs(job):
    while job.status()["state"] != "running":
        time.sleep(0.05)
    return job

threading.Thread(target=look).start()
first = runs(run(flow(), 2, snapshots=here / "snapshots", registry=registry))
print(first.status()["size"], "workers", flush=True)
first.stop()
second = runs(run(flow(), 2, snapshots=here / "snapshots", registry=registry))
first.close()
print(second.snapshot(timeout=120) > 0, second.status()["state"], registry.find("cell").url == second.url, flush=True)
second.close()
print("stopped" if SparkContext._active_spark_context is None else "left", registry.find("cell"), flush=True)
"""


def driver(program: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, directory],
        cwd=ROOT,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives to a command
    )


@pytest.mark.spark
def test_ctrl_c_drains_and_kills_nobody_and_nothing_is_printed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    with driver(PROGRAM, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        os.killpg(process.pid, signal.SIGINT)  # the JVM gets it as well, as from a terminal
        out, err = process.communicate(timeout=120)
    assert out.splitlines() == [
        "draining",
        "['ended', 'ended']",
        "the Spark session was stopped while the worker ran",
        "the Spark session is stopped: nothing can start",
    ]
    assert err == "", "neither of the worker that was killed nor of the one that was left"
    left = desk.pid(desk.spec(3, job="driver"))
    eventually("deaf to SIGHUP, it ends with its session", lambda: not is_alive(left))
    assert process.returncode == 0


@pytest.mark.spark
def test_a_session_of_the_user_will_do_and_no_worker_outlives_its_driver(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    with driver(ON_A_SESSION_OF_THE_USER, tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "running\n", process.stderr.read()
        pids = [desk.pid(desk.spec(number, job="driver")) for number in range(2)]
        assert all(map(is_alive, pids))
        os.kill(process.pid, signal.SIGKILL)
        eventually("they are gone", lambda: not any(map(is_alive, pids)))


def test_a_second_interrupt_interrupts_and_the_old_handler_comes_back() -> None:
    asked: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with interrupts(lambda: asked.append("drain")):
        signal.raise_signal(signal.SIGINT)
        assert asked == ["drain"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == ["drain"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.spark
def test_what_is_sent_to_the_whole_group_stops_the_flow_with_a_last_snapshot(
    tmp_path: Path,
) -> None:
    flow = ROOT / "examples" / "wordcount.py"
    command: list[str | Path] = [sys.executable, "-m", "railgun", "run", flow]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"RAILGUN_JOBS": str(tmp_path / "jobs")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        told = ""
        for told in process.stdout:
            if told.startswith("running"):
                break
        assert told.startswith("running on 2 workers"), process.communicate()
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert "stopping: a last snapshot" in out
    assert "finished: stopped; everything is saved, in snapshot 1" in out
    assert (err, process.returncode) == ("", 0)


@pytest.mark.spark
def test_a_job_is_seen_while_spark_starts_and_the_same_cell_can_be_run_twice(
    tmp_path: Path,
) -> None:
    with driver(TWICE, tmp_path) as process:
        out, err = process.communicate(timeout=300)
    assert out.splitlines() == [
        "starting before Spark",
        "3 workers",
        "True running True",
        "stopped None",
    ], err
    assert process.returncode == 0
