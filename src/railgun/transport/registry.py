"""Registry of running jobs, by which other terminals find a job: one file per job, in a directory private to its user.

Rules:

1. A file holds the address of the job's HTTP API, and its token: the directory has mode 0700 and the file 0600 from
   their creation on. Files appear complete, and at once.
2. A name belongs to one running job. A second job of the same name is refused with an error that names the first. A job
   that has ended, and is not closed, is still found by its name until another job takes the name.
3. A job that is closed removes its file. A job that could not (kill -9, power failure) leaves a stale file, which is
   recognized: its process is gone, or another process has its number, or nothing listens at its address. The process
   that notices a stale file removes it.
4. The state of a job on another machine, or in another container (a shared home), is unknown here: its file is left
   alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from railgun.errors import ExitCode, RailgunError
from railgun.storage.processes import Process

CONNECT_TIMEOUT_S: Final = 2.0


class RegistryError(RailgunError):
    """The directory of jobs cannot be used, or a name is invalid."""


class JobRunsError(RailgunError):
    """A job of this name is already running."""

    exit_code = ExitCode.NO_JOB
    kind = "name-taken"


@dataclass(frozen=True, slots=True)
class Entry:
    """The address of a job, the token of its API, and the process it runs in."""

    name: str
    url: str
    token: str = field(repr=False)
    pid: int
    birth: str
    """When the process began, as its system writes it: distinguishes it from a later process of that number."""
    machine: str
    started: float
    machine_id: str = ""
    boot_id: str = ""
    namespace: str = ""
    over: bool = False
    """Whether the job has ended: its API still answers, and its name is free."""

    @staticmethod
    def of_this_process(name: str, url: str, token: str) -> Entry:
        """Return the entry of a job that runs in this process."""
        me = Process.this()
        return Entry(
            *(name, url, token, me.pid, me.birth, me.host, time.time()),
            *(me.machine_id, me.boot_id, me.namespace),
        )

    @property
    def process(self) -> Process:
        """The process in which the job runs."""
        return Process(
            self.machine, self.pid, self.birth, self.machine_id, self.boot_id, self.namespace
        )

    def is_of(self, other: Entry) -> bool:
        """Return whether both entries are of the same job."""
        return replace(self, over=other.over) == other


def default_directory() -> Path:
    """Return the default directory of jobs: `RAILGUN_JOBS` if it is set, else ~/.railgun/jobs."""
    configured = os.environ.get("RAILGUN_JOBS")
    return Path(configured) if configured else Path.home() / ".railgun" / "jobs"


class Registry:
    """The running jobs of a user on this machine."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = default_directory() if directory is None else Path(directory)

    def add(self, entry: Entry) -> None:
        """Register a job; raise `JobRunsError` if a job of this name is running."""
        path = self._path(entry.name)
        with self._locked():
            existing = self._read(path)
            if existing is not None and not existing.over and self._is_alive(existing):
                raise JobRunsError(
                    f"a job {entry.name!r} runs already: process {existing.pid} on {existing.machine}, "
                    f"since {time.strftime('%F %T', time.localtime(existing.started))}. "
                    f"Stop it (railgun stop {entry.name}), or give this one another name."
                )
            self._write(path, entry)

    def end(self, entry: Entry) -> None:
        """Free the name of a job that has ended, while its API still answers."""
        self._change(entry, lambda path: self._write(path, replace(entry, over=True)))

    def remove(self, entry: Entry) -> None:
        """Remove a job that is closed; leave alone the file that another job of its name has written since."""
        self._change(entry, lambda path: path.unlink(missing_ok=True))

    def _change(self, entry: Entry, change: Callable[[Path], None]) -> None:
        """Change the file of a job, unless another job of its name has written it since."""
        path = self._path(entry.name)
        if not self.directory.is_dir():
            return
        with self._locked():
            existing = self._read(path)
            if existing is not None and existing.is_of(entry):
                change(path)

    def find(self, name: str) -> Entry | None:
        """Return the running job of this name, or None."""
        path = self._path(name)
        entry = self._read(path)
        if entry is None or self._is_alive(entry):
            return entry
        self._clean(path, entry)
        return None

    def jobs(self) -> list[Entry]:
        """Return all running jobs, sorted by name."""
        try:
            paths = sorted(self.directory.glob("*.json"))
        except OSError:
            return []
        entries = [self.find(path.stem) for path in paths]
        return [entry for entry in entries if entry is not None]

    # ------------------------------------------------------------ files

    def _path(self, name: str) -> Path:
        if not name or name.startswith(".") or any(c in name for c in "/\\\0"):
            raise RegistryError(f"{name!r} cannot be the name of a job")
        return self.directory / f"{name}.json"

    def _write(self, path: Path, entry: Entry) -> None:
        number, temporary = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".new")
        try:  # mkstemp makes files of mode 0600
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump(asdict(entry), file)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the directory during the block; create it if it does not exist. Raises `RegistryError`."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.directory.stat().st_uid != os.getuid():
                raise RegistryError(f"{self.directory} belongs to another user")
            self.directory.chmod(0o700)
            lock = os.open(self.directory / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RegistryError(
                f"jobs are kept in {self.directory}, which cannot be used: {error.strerror}. "
                "Name another directory in RAILGUN_JOBS."
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    @staticmethod
    def _read(path: Path) -> Entry | None:
        try:
            fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
            entry = Entry(**fields)
        except (OSError, ValueError, TypeError):
            return None
        plain = isinstance(entry.pid, int) and isinstance(entry.url, str)
        return entry if plain and isinstance(entry.token, str) else None

    def _clean(self, path: Path, stale: Entry) -> None:
        with contextlib.suppress(RegistryError), self._locked():
            if self._read(path) == stale:
                path.unlink(missing_ok=True)

    # ------------------------------------------------------------ life

    @staticmethod
    def _is_alive(entry: Entry) -> bool:
        if entry.process.is_gone():
            return False
        here = Process.this()
        elsewhere = replace(entry.process, pid=here.pid, birth=here.birth) != here
        if elsewhere:
            return True
        at = urlsplit(entry.url)
        try:
            with socket.create_connection((at.hostname or "", at.port or 0), CONNECT_TIMEOUT_S):
                return True
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # perhaps busy: its process exists
