"""A PostgreSQL server for tests: `with server() as url`. On loopback, at a free port, in a directory of its own.

It is the one that is installed (`/usr/lib/postgresql/*/bin`, or PATH); if there is none, apt-get is asked for one. It
refuses to be run by root: it runs as `postgres`, or `nobody`, then. `stop` and `start` are for tests of a server that
goes away.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from verification.ports import free_port

DEADLINE = 60.0


@dataclass
class Server:
    """A server; `url` is of its database, for its superuser."""

    programs: Path
    directory: Path
    port: int
    user: dict[str, Any]
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"postgresql://tester:secret@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Run it, until it answers."""
        import psycopg

        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    self.programs / "postgres", "-D", self.directory / "data", "-p", str(self.port),
                    "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=",
                    "-c", "max_prepared_transactions=10", "-c", "fsync=off",
                ],
                cwd=self.directory, stdout=log, stderr=log, **self.user,
            )  # fmt: skip
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                told = (self.directory / "log").read_text(errors="replace")[-2000:]
                assert self.process.poll() is None, f"the server has ended: {told}"
                assert time.monotonic() < deadline, f"the server does not answer: {told}"
                time.sleep(0.05)

    def stop(self) -> None:
        """End it at once, as it ends in order; all connections are lost."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGQUIT)
                self.process.wait(DEADLINE)
            self.process = None

    @contextlib.contextmanager
    def followed(self) -> Iterator[Server]:
        """Another server, which follows this one."""
        directory = self.directory / "other"
        directory.mkdir()
        if self.user:
            shutil.chown(directory, self.user["user"])
        subprocess.run(
            [
                self.programs / "pg_basebackup", "-D", directory / "data", "-d", self.url, "-R",
                "--checkpoint=fast", "--no-sync",
            ],
            check=True, cwd=directory, **self.user,
        )  # fmt: skip
        made = Server(self.programs, directory, free_port(), self.user)
        try:
            made.start()
            yield made
        finally:
            made.stop()
            shutil.rmtree(directory)


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """A server with nothing in it."""
    programs = _programs()
    directory = Path(tempfile.mkdtemp(prefix="railgun-postgres-"))
    user = _user()
    try:
        (directory / "password").write_text("secret")
        if user:
            for path in (directory, directory / "password"):
                shutil.chown(path, user["user"])
        subprocess.run(
            [
                programs / "initdb", "-D", directory / "data", "-U", "tester", "--auth=scram-sha-256",
                f"--pwfile={directory / 'password'}", "--no-sync", "--encoding=UTF8", "--locale=C",
            ],
            check=True, cwd=directory, stdout=subprocess.DEVNULL, **user,
        )  # fmt: skip
        made = Server(programs, directory, free_port(), user)
        try:
            made.start()
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _programs() -> Path:
    """Where `postgres` and `initdb` are; they are installed if they are not there."""
    found = _find()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "-y", "--no-install-recommends", "postgresql"]):
            subprocess.run(["apt-get", "-q", *words], env=environment, check=False)
        found = _find()
    if found is None:
        what = "THERE IS NO POSTGRESQL, and it cannot be installed: what needs it is NOT TESTED"
        warnings.warn(what, stacklevel=2)
        pytest.skip(what)
    return found


def _find() -> Path | None:
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: p.parent.name.zfill(4))
    on_path = shutil.which("initdb")
    if on_path is not None:
        places.append(Path(on_path).resolve().parent)
    whole = [p for p in places if (p / "initdb").exists() and (p / "postgres").exists()]
    return whole[-1] if whole else None


def _user() -> dict[str, Any]:
    """Whom it runs as."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}
    raise AssertionError("PostgreSQL refuses to be run by root, and there is no other user")
