"""The daemon that loads modules ahead: no thread when it forks, nothing on stdout, nothing it insists on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from railgun.spark.daemon import NO_THREADS
from railgun.spark.session import SparkSession


def told_by(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_thread_runs_when_it_forks_and_its_port_is_all_it_prints() -> None:
    environment = {name: os.environ[name] for name in os.environ.keys() - NO_THREADS.keys()}
    with subprocess.Popen(
        [sys.executable, "-m", "railgun.spark.daemon", "pyspark.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as daemon:
        assert daemon.stdout is not None
        port = int.from_bytes(daemon.stdout.read(4))
        with socket.create_connection(("127.0.0.1", port), timeout=60):
            assert len(os.listdir(f"/proc/{daemon.pid}/task")) == 1
        daemon.communicate(timeout=60)  # the end of its input is its end


def test_what_is_missing_broken_or_talkative_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text("print('hello')")
    (tmp_path / "broken.py").write_text("1 / 0")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from railgun.spark.daemon import preload; "
        "print(preload(('talks', 'broken', 'not_there')))"
    )
    assert told_by(program) == "['broken', 'not_there']"


@pytest.mark.spark
def test_tasks_of_a_local_session_begin_with_modules_loaded(spark: SparkSession) -> None:
    def loaded(_: int) -> tuple[str, bool]:
        import sys

        return sys.modules["__main__"].__spec__.name, "railgun.spark.task" in sys.modules  # type: ignore[union-attr]

    found = spark.sparkContext.parallelize([0], 1).map(loaded).collect()
    assert found == [("railgun.spark.daemon", True)]
