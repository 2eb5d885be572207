"""The package as users install it: a wheel in an empty environment, without the repository, with and without Spark."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_INSTALLED_MIB = 150
FLOW = """
from railgun import Collect, Flow, Items
from railgun.testing import FlowTester

flow = Flow("words")
lines = flow.source(Items(["to be or", "not to be"]), name="lines")
words = lines.flat_map(str.split).key_by(str)
counts = words.stateful_map(lambda n, word: (n + 1, (word, n + 1)), initial=int, name="count")
counts.sink(Collect(), name="counts")

if __name__ == "__main__":
    tester = FlowTester(flow, workers=2, feed=["lines"])
    tester.feed("lines", ["to be or"])
    tester.rescale(5)
    tester.feed("lines", ["not to be"])
    print(sorted(tester.state("count").items()))
"""


class Installed:
    """An environment with nothing but the wheel and what it needs, and a directory to work in."""

    def __init__(self, home: Path, work: Path) -> None:
        self.home, self.work = home, work
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        } | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "RAILGUN_JOBS": str(work / "jobs")}

    def run(self, *words: str, timeout_s: float = 120.0) -> str:
        """Run a command; return what it prints."""
        done = subprocess.run(
            words,
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command in the background, within this."""
        with subprocess.Popen(
            words, cwd=self.work, env=self.environment, stdout=subprocess.DEVNULL
        ) as process:
            try:
                yield process
            finally:
                process.terminate()

    def size_mib(self) -> float:
        """Return the size of what is installed."""
        [packages] = self.home.glob("lib/python*/site-packages")
        pip = {"pip", "setuptools", "_distutils_hack"}
        files = (
            file
            for entry in packages.iterdir()
            if re.split(r"[-.]", entry.name)[0] not in pip
            for file in (entry.rglob("*") if entry.is_dir() else [entry])
        )
        return sum(file.stat().st_size for file in files if file.is_file()) / (1 << 20)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("wheel")
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    subprocess.run(
        [sys.executable, *pip, "wheel", "--no-deps", "-w", base / "wheels", ROOT], check=True
    )
    subprocess.run([sys.executable, "-m", "venv", base / "venv"], check=True)
    [wheel] = (base / "wheels").glob("railgun-*.whl")
    subprocess.run([base / "venv" / "bin" / "python", *pip, "install", wheel], check=True)
    work = base / "work"
    work.mkdir()
    return Installed(base / "venv", work)


def test_the_installation_is_small_and_has_no_spark(installed: Installed) -> None:
    assert installed.size_mib() < MAX_INSTALLED_MIB
    for package in ("pyspark", "pyarrow", "pandas"):
        with pytest.raises(AssertionError, match="ModuleNotFoundError"):
            installed.run("python", "-c", f"import {package}")


def test_nothing_of_the_proof_is_shipped(installed: Installed) -> None:
    for module in ("verification", "bench", "tests"):
        with pytest.raises(AssertionError, match="ModuleNotFoundError"):
            installed.run("python", "-c", f"import {module}")


def test_the_broker_and_its_commands_run(installed: Installed) -> None:
    with installed.running("railgun", "serve", "--port", "0", "--http-port", "none"):
        for _ in range(100):
            if (installed.work / "railgun-data" / "node.json").exists():
                break
            time.sleep(0.1)
        installed.run("railgun", "stream", "ensure", "orders")
        installed.run("railgun", "pub", "orders", '{"customer": "ada", "amount": 7}')
        assert installed.run("railgun", "sub", "orders") == '{"customer": "ada", "amount": 7}\n'
        program = (
            "import railgun\n"
            "with railgun.connect_sync() as client:\n"
            "    client.publish('orders', b'second')\n"
            "    print(client.admin('describe', name='orders')['end'])\n"
        )
        assert installed.run("python", "-c", program) == "2\n"


def test_a_flow_runs_in_one_process(installed: Installed) -> None:
    (installed.work / "words.py").write_text(FLOW)
    printed = installed.run("python", "words.py")
    assert printed == "[('be', 2), ('not', 1), ('or', 1), ('to', 2)]\n"
    assert "count" in installed.run("railgun", "draw", "words.py")


def test_what_needs_spark_says_how_to_install_it(installed: Installed) -> None:
    (installed.work / "words.py").write_text(FLOW)
    with pytest.raises(AssertionError, match=r"pip install 'railgun\[spark\]'"):
        installed.run("railgun", "run", "words.py")
    with pytest.raises(AssertionError, match=r"pip install 'railgun\[spark\]'"):
        installed.run("python", "-c", "import railgun; railgun.Parquet('results').open(None)")


def test_a_file_of_the_user_does_not_stand_in_for_a_module_of_ours(installed: Installed) -> None:
    for name in ("socket", "rich", "aiohttp", "json"):
        (installed.work / f"{name}.py").write_text("raise SystemExit('taken from the directory')")
    try:
        assert "no jobs are running" in installed.run("python", "-m", "railgun", "status")
    finally:
        for name in ("socket", "rich", "aiohttp", "json"):
            (installed.work / f"{name}.py").unlink()
