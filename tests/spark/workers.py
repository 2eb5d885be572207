"""Entries for workers, and eyes on their processes.

Entries are made by functions, so that they are pickled by value: the processes of Spark have no way
to import a test.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from railgun.engine.worker.spec import WorkerSpec
from railgun.spark.task import Entry

T = TypeVar("T")
WITHIN = 120.0
"""Seconds: a machine that is that slow is taken for broken."""


def eventually(what: str, look: Callable[[], T], within: float = WITHIN) -> T:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)
    return found


class Endings:
    """Takes the calls of `ended`, in their order."""

    def __init__(self) -> None:
        self._calls: queue.Queue[tuple[WorkerSpec, str | None]] = queue.Queue()

    def __call__(self, spec: WorkerSpec, error: str | None) -> None:
        self._calls.put((spec, error))

    def next(self) -> tuple[WorkerSpec, str | None]:
        return self._calls.get(timeout=WITHIN)

    @property
    def none_left(self) -> bool:
        return self._calls.empty()


class Desk:
    """A directory where workers leave notes: their pid when they begin."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def spec(self, worker: int = 0, incarnation: int = 0, job: str | None = None) -> WorkerSpec:
        """A spec that no other test uses; its host is the desk."""
        name = job or uuid.uuid4().hex[:8]
        return WorkerSpec(name, worker, incarnation, str(self.path), 0, b"secret")

    def note(self, spec: WorkerSpec) -> Path:
        return self.path / f"{spec.job}-{spec.worker}-{spec.incarnation}"

    def has_begun(self, spec: WorkerSpec) -> bool:
        return self.note(spec).exists()

    def pid(self, spec: WorkerSpec) -> int:
        """The process of a worker, once it has begun."""
        eventually(f"{spec} has begun", lambda: self.has_begun(spec))
        return int(self.note(spec).read_text().split()[0])

    def dismiss(self, spec: WorkerSpec) -> None:
        """Let a worker that waits end."""
        self.note(spec).with_suffix(".go").touch()

    def dismiss_all(self) -> None:
        """Let all that wait end: Spark takes longer to kill them."""
        (self.path / "all.go").touch()


def is_alive(pid: int) -> bool:
    """Whether a process is there, and is more than an entry that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends() -> Entry:
    """Notes its pid and ends."""

    def entry(spec: WorkerSpec) -> None:
        import os
        from pathlib import Path

        note = Path(spec.host) / f"{spec.job}-{spec.worker}-{spec.incarnation}"
        note.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
        note.with_suffix(".new").rename(note)

    return entry


def waits() -> Entry:
    """Notes its pid and stays until it is dismissed; deaf to SIGHUP, as a careless worker may be."""
    begin = ends()

    def entry(spec: WorkerSpec) -> None:
        import signal
        import time
        from pathlib import Path

        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        begin(spec)
        go = Path(spec.host) / f"{spec.job}-{spec.worker}-{spec.incarnation}.go"
        while not (go.exists() or go.with_name("all.go").exists()):
            time.sleep(0.02)

    return entry


def raises(error: BaseException) -> Entry:
    """Raises this."""

    def entry(spec: WorkerSpec) -> None:
        raise error

    return entry


def imports(module: str) -> Entry:
    """Needs a module."""

    def entry(spec: WorkerSpec) -> None:
        import importlib

        importlib.import_module(module)

    return entry
