"""How other terminals find a job: one file per job, in a directory that only its user can read.

Rules:

1. A file says where the job's HTTP API is, and holds its token: the directory has mode 0700, the file 0600, from the
   moment they are there. Files appear whole, and at once.
2. A name belongs to one running job. Who comes second is told who was first. A job that has ended, and is not closed,
   is still found by its name until another one takes it.
3. A job that is closed removes its file. One that could not (kill -9, power) leaves a stale file, which is recognised:
   its process is gone, or another one has got its number, or nobody listens at its address. Whoever sees it removes it.
4. Of a job on another machine, or in another container (a shared home), nothing can be known here: its file is left
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

PATIENCE: Final = 2.0


class RegistryError(RailgunError):
    """The directory of jobs cannot be used."""


class JobRunsError(RailgunError):
    """There is a running job of this name."""

    exit_code = ExitCode.NO_JOB
    kind = "name-taken"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a job is, and who may talk to it."""

    name: str
    url: str
    token: str = field(repr=False)
    pid: int
    birth: str
    """When the process began, in the words of its system: tells it from a later one of that number."""
    machine: str
    started: float
    machine_id: str = ""
    boot_id: str = ""
    namespace: str = ""
    over: bool = False
    """Whether the job has ended: it still tells of itself, and its name is free."""

    @staticmethod
    def of_this_process(name: str, url: str, token: str) -> Entry:
        """The entry of a job in this process."""
        me = Process.this()
        return Entry(
            *(name, url, token, me.pid, me.birth, me.host, time.time()),
            *(me.machine_id, me.boot_id, me.namespace),
        )

    @property
    def process(self) -> Process:
        """The process of the job."""
        return Process(
            self.machine, self.pid, self.birth, self.machine_id, self.boot_id, self.namespace
        )

    def is_of(self, other: Entry) -> bool:
        """Whether both are of the same job."""
        return replace(self, over=other.over) == other


def default_directory() -> Path:
    """Where jobs are found if nothing else is said: `RAILGUN_JOBS`, or else ~/.railgun/jobs."""
    told = os.environ.get("RAILGUN_JOBS")
    return Path(told) if told else Path.home() / ".railgun" / "jobs"


class Registry:
    """The jobs of a user on this machine."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = default_directory() if directory is None else Path(directory)

    def add(self, entry: Entry) -> None:
        """Make a job known; raises `JobRunsError` if one of this name runs."""
        path = self._path(entry.name)
        with self._locked():
            known = self._read(path)
            if known is not None and not known.over and self._is_alive(known):
                raise JobRunsError(
                    f"a job {entry.name!r} runs already: process {known.pid} on {known.machine}, "
                    f"since {time.strftime('%F %T', time.localtime(known.started))}. "
                    f"Stop it (railgun stop {entry.name}), or give this one another name."
                )
            self._write(path, entry)

    def end(self, entry: Entry) -> None:
        """Let another job take the name of one that has ended, and still tells of itself."""
        self._change(entry, lambda path: self._write(path, replace(entry, over=True)))

    def remove(self, entry: Entry) -> None:
        """Remove a job that is closed; leaves alone what another job of its name has written since."""
        self._change(entry, lambda path: path.unlink(missing_ok=True))

    def _change(self, entry: Entry, change: Callable[[Path], None]) -> None:
        """Change the file of a job, unless another job of its name has written it since."""
        path = self._path(entry.name)
        if not self.directory.is_dir():
            return
        with self._locked():
            known = self._read(path)
            if known is not None and known.is_of(entry):
                change(path)

    def find(self, name: str) -> Entry | None:
        """The running job of this name."""
        path = self._path(name)
        entry = self._read(path)
        if entry is None or self._is_alive(entry):
            return entry
        self._clean(path, entry)
        return None

    def jobs(self) -> list[Entry]:
        """All running jobs, by name."""
        try:
            paths = sorted(self.directory.glob("*.json"))
        except OSError:
            return []
        found = [self.find(path.stem) for path in paths]
        return [entry for entry in found if entry is not None]

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
        """Alone in the directory, which is made if there is none."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.directory.stat().st_uid != os.getuid():
                raise RegistryError(f"{self.directory} belongs to somebody else")
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
            told: dict[str, Any] = json.loads(path.read_text("utf-8"))
            entry = Entry(**told)
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
            with socket.create_connection((at.hostname or "", at.port or 0), PATIENCE):
                return True
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # busy, perhaps: its process is there
