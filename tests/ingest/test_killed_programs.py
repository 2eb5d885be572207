"""A program feeds a flow that another program runs; both are killed, again and again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.ingest.fed_flow import shown

ROOT = Path(__file__).parents[2]
COUNT = 6_000

FLOW = """
import sys
import time
from pathlib import Path
from tests.ingest.fed_flow import fed_job

home = Path(sys.argv[1])
with fed_job(home, int(sys.argv[2])) as job:
    while not (home / "stop").exists():
        time.sleep(0.05)
        assert not job.over, job.status()["cause"]
    job.stop()
"""

FEEDER = """
import sys
import time
from pathlib import Path
from railgun.ingest import SyncConnector

home, name = Path(sys.argv[1]), sys.argv[2]
lines = (home / f"{name}.txt").read_text().splitlines()

def after(por):
    for number in range(0 if por is None else por + 1, len(lines)):
        if number % 200 == 0:
            time.sleep(0.05)
        yield number, lines[number]

with SyncConnector("fed", registry=home / "jobs", timeout=60) as c:
    c.feed(name, after)
"""


def start(program: str, *told: str) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-c", program, *told],
        env={**os.environ, "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
    )


def test_what_is_committed_is_byte_for_byte_what_was_fed(tmp_path: Path) -> None:
    """Feeders in a loop of kills, a lost controller, another number of workers."""
    chance = random.Random(7)
    names = ["left", "right"]
    for name in names:
        lines = [f"{name} {number} {chance.random()}" for number in range(COUNT)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    flow = start(FLOW, str(tmp_path), "2")
    feeders = {name: start(FEEDER, str(tmp_path), name) for name in names}
    kills, deadline = [*names, "flow", *names], time.monotonic() + 120
    hit = 0
    try:
        for victim in kills:
            time.sleep(chance.uniform(0.3, 1.2))
            if victim == "flow":
                flow.send_signal(signal.SIGKILL)
                flow.communicate()
                flow = start(FLOW, str(tmp_path), "3")
            elif feeders[victim].poll() is None:
                hit += 1
                feeders[victim].send_signal(signal.SIGKILL)
                feeders[victim].communicate()
                feeders[victim] = start(FEEDER, str(tmp_path), victim)
        assert hit >= 2  # else they were too quick for this to mean anything
        for feeder in feeders.values():
            _, told = feeder.communicate(timeout=max(1.0, deadline - time.monotonic()))
            assert feeder.returncode == 0, told.decode()
        (tmp_path / "stop").touch()
        _, told = flow.communicate(timeout=60)
        assert flow.returncode == 0, told.decode()
    finally:
        for process in (flow, *feeders.values()):
            if process.poll() is None:
                process.kill()
                process.communicate()
    rows = shown(tmp_path / "out")
    for name in names:
        texts = [text.split("\t", 2)[2] for stream, text in rows if stream == name]
        assert "\n".join(texts).encode() + b"\n" == (tmp_path / f"{name}.txt").read_bytes()
