"""A PostgreSQL server on loopback for tests: found on this machine, or installed by apt-get where that can be."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

DEADLINE = 60.0


def binaries() -> Path | None:
    """Where the server's programs are."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: path.parts[-3]
    )
    if found:
        return found[-1].parent
    other = shutil.which("initdb")
    return Path(other).resolve().parent if other else None


def install() -> Path:
    """Where they are, after installing them if need be."""
    where = binaries()
    if where is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for line in (
            ["update", "-q"],
            ["install", "-q", "-y", "--no-install-recommends", "postgresql"],
        ):
            subprocess.run(["apt-get", *line], env=environment, capture_output=True, timeout=600)
        where = binaries()
    if where is None:
        pytest.skip(
            "NOT TESTED: tables of PostgreSQL. There is no server here, and none can be installed"
        )
    return where


def somebody() -> str | None:
    """The server refuses to run as root: as whom it runs then."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    pytest.skip(
        "NOT TESTED: tables of PostgreSQL. Its server does not run as root, and there is nobody else"
    )


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A server; its URL."""
    programs, user = install(), somebody()
    home = Path(tempfile.mkdtemp(prefix="railgun-pg-"))
    process: subprocess.Popen[bytes] | None = None
    try:
        if user is not None:
            shutil.chown(home, user)
        data = home / "data"
        initdb: list[str | Path] = [
            programs / "initdb",
            "-D",
            data,
            "-U",
            "railgun",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        subprocess.run(initdb, user=user, check=True, capture_output=True, cwd=home)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        line: list[str | Path] = [programs / "postgres", "-D", data, "-p", str(port)]
        line += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(line, user=user, cwd=home, stdout=log, stderr=log)
        url = f"postgresql://railgun@127.0.0.1:{port}/postgres"
        deadline = time.monotonic() + DEADLINE
        while True:
            assert process.poll() is None, (home / "log").read_text()
            try:
                psycopg.connect(url, connect_timeout=2).close()
                break
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (home / "log").read_text()
                time.sleep(0.05)
        yield url
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)  # fast shutdown
            process.wait(DEADLINE)
        shutil.rmtree(home, ignore_errors=True)
