"""Servers of messages in processes of their own, on loopback, each in a directory of its own: ours, NATS and Redis.

They run as whoever installs them gets them, which is lazy about the disk in both peers: JetStream keeps files and syncs
them every two minutes; Redis (`appendonly yes`) appends to a file and syncs it every second (`appendfsync everysec`,
its default). A server is ended by its process, whatever happens; on Linux also if this program is killed.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verification.debian import NoProgramError, find_program
from verification.ports import free_port

from bench._peers import ENVIRONMENTS, PeerError, end_with_parent, interpreter

PATIENCE = 30.0  # seconds to start or to end
REDIS_PACKAGES = ("redis-server", "redis-tools", "liblzf1", "libjemalloc2")


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs."""

    process: int
    port: int
    data: Path
    seconds: float
    """From its start until it answered."""


# ---------------------------------------------------------------- which there are


@contextlib.contextmanager
def ours(data: Path) -> Iterator[Server]:
    """A node, as `railgun serve` runs it."""
    command = [sys.executable, "-m", "railgun", "serve", "--data", str(data), "--port", "0"]
    with _running([*command, "--json"], data) as (process, began):
        _wait(process, data, lambda: _listening(data) is not None)
        took, port = time.perf_counter() - began, _listening(data)
        assert port is not None
        yield Server(process.pid, port, data, took)


@contextlib.contextmanager
def nats(data: Path) -> Iterator[Server]:
    """A NATS server with JetStream."""
    program = interpreter("nats").parent / "nats-server"
    port = free_port()
    command = [str(program), "--jetstream", "--store_dir", str(data), "--addr", "127.0.0.1"]
    with _running([*command, "--port", str(port)], data) as (process, began):
        _wait(process, data, lambda: _answers(port))
        yield Server(process.pid, port, data, time.perf_counter() - began)


@contextlib.contextmanager
def redis(data: Path) -> Iterator[Server]:
    """A Redis server that appends to a file."""
    program, environment = redis_program()
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(data)]
    command += ["--appendonly", "yes", "--appendfsync", "everysec"]
    with _running(command, data, environment) as (process, began):
        _wait(process, data, lambda: _answers(port))
        yield Server(process.pid, port, data, time.perf_counter() - began)


# ---------------------------------------------------------------- processes


@contextlib.contextmanager
def _running(
    command: Sequence[str], data: Path, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A process that is ended afterwards, in order if it can be."""
    data.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with open(_words(data), "wb") as words:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            preexec_fn=end_with_parent,
        )
    try:
        yield process, began
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _words(data: Path) -> Path:
    """What a server has said: beside its directory."""
    return data.with_suffix(".log")


def _wait(process: subprocess.Popen[bytes], data: Path, ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            said = "\n".join(_words(data).read_text("utf-8", "replace").splitlines()[-10:])
            how = "did not answer" if process.returncode is None else "ended at its start"
            raise PeerError(f"a server {how}: {said}")
        time.sleep(0.005)


def _listening(data: Path) -> int | None:
    """The port a node says that it listens on."""
    for line in _words(data).read_text("utf-8", "replace").splitlines(keepends=True):
        if line.startswith('{"listening"') and line.endswith("\n"):
            return int(json.loads(line)["listening"]["port"])
    return None


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


# ---------------------------------------------------------------- where Redis comes from


def redis_program() -> tuple[str, dict[str, str]]:
    """The Redis server of this machine; if it has none, one that is fetched from Debian. And its environment."""
    try:
        return find_program("redis-server", REDIS_PACKAGES, ENVIRONMENTS / "redis-server")
    except NoProgramError as error:
        raise PeerError(str(error)) from error
