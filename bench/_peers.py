"""Other engines, each in a virtual environment of its own that is made when it is first needed.

What a peer needs must not come into our own environment, and what we need must not hold a peer back.
An environment is made from a lock file (every package pinned by hash) in `.peers/` and kept until
that file changes. A peer is a module of `bench/peers/` that prints what it measured as its last line.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench._workload import Rate
from railgun.errors import RailgunError

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks" / "peers"
ENVIRONMENTS = ROOT / ".peers"
PARENT_DIES = 1  # PR_SET_PDEATHSIG
PATIENCE = 240  # seconds for a peer to start, to become warm and to end


class PeerError(RailgunError):
    """A peer could not be installed, or did not come to its end."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to run beside us: its lock file, its module in `bench.peers`, its arguments."""

    lock: str
    module: str
    arguments: tuple[str, ...] = ()

    def run(self, seconds: float) -> Rate:
        """Let it work for so many seconds once it is warm."""
        return Rate.of_line(self.ask("--seconds", str(seconds), patience=PATIENCE + 2 * seconds))

    def ask(self, *more: str, patience: float = PATIENCE) -> str:
        """Let it do its work with more arguments; the last line it prints."""
        command = [str(interpreter(self.lock)), "-m", f"bench.peers.{self.module}"]
        command += [*self.arguments, *more]
        environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
        return last_line(command, environment, patience)


def end_with_parent() -> None:
    """End this process when the one that has started it ends, however that is; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)


def last_line(
    command: Sequence[str],
    environment: Mapping[str, str],
    patience: float = PATIENCE,
    heard: Callable[[str], object] = lambda line: None,
) -> str:
    """Run a program to its end; the last line it prints. What it says on stderr is heard meanwhile."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what it starts can be ended with it
        preexec_fn=end_with_parent,
    )
    said: deque[str] = deque(maxlen=10)
    told: list[str] = []

    def listen(pipe: IO[str], hear: Callable[[str], object]) -> threading.Thread:
        def read() -> None:
            with pipe:
                for line in pipe:
                    hear(line.rstrip("\n"))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def complaint(line: str) -> None:
        said.append(line)
        heard(line)

    assert process.stdout is not None
    assert process.stderr is not None
    listening = [listen(process.stdout, told.append), listen(process.stderr, complaint)]
    name = " ".join(command[1:4])
    try:
        process.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        raise PeerError(
            f"{name} did not end in time; see what it does with: {' '.join(command)}"
        ) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for thread in listening:  # a grandchild that has outlived it may keep a pipe open
            thread.join(timeout=5)
    if process.returncode or not told:
        raise PeerError(f"{name} ended with code {process.returncode}:\n" + "\n".join(said))
    return told[-1]


PEERS = {
    "Bytewax, batches of 5,000": Peer("bytewax", "bytewax_sum", ("--batch", "5000")),
    "Bytewax, batches of 20,000": Peer("bytewax", "bytewax_sum", ("--batch", "20000")),
    "Spark, Python": Peer("spark", "spark_sum", ("--engine", "python")),
    "Spark, JVM": Peer("spark", "spark_sum", ("--engine", "jvm")),
}


def interpreter(name: str) -> Path:
    """The interpreter of the environment of lock file `name`, which is made if need be."""
    home, lock = ENVIRONMENTS / name, LOCKS / f"{name}.txt"
    identity = repr((sys.version_info[:2], str(home))).encode()
    stamp = hashlib.sha256(lock.read_bytes() + identity).hexdigest()
    stamp_file, python = home / "locked", home / "bin" / "python"
    ENVIRONMENTS.mkdir(exist_ok=True)
    with open(ENVIRONMENTS / f"{name}.guard", "w") as guard:  # two at once: the second one waits
        fcntl.flock(guard, fcntl.LOCK_EX)
        if stamp_file.exists() and stamp_file.read_text("utf-8") == stamp:
            return python
        print(f"bench: making {home} from {lock.relative_to(ROOT)} (once)", file=sys.stderr)
        pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
        for command in (
            (sys.executable, "-m", "venv", "--clear", home),
            (*pip, "--require-hashes", "--no-deps", "-r", lock),
        ):
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode:
                raise PeerError(
                    f"the environment of {name} could not be made: "
                    f"{' '.join(map(str, command))} said:\n{made.stderr.strip()}"
                )
        stamp_file.write_text(stamp, "utf-8")
    return python
