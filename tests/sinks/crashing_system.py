"""A system that stops working before any of its calls: a test can crash wherever there is something to crash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from railgun.errors import ProcessEnd
from railgun.sinks import files, parquet, staging

CALLS = ("open", "fdopen", "write", "mkdir", "fsync", "rename", "unlink", "rmdir", "link")


class CrashError(ProcessEnd):
    """The process is gone. Nothing that runs in it may catch this."""


class System:
    """Stands for `os`. Nothing is really synced: that takes long, and no test here cuts the power."""

    def __init__(self, before: Callable[[int], None]) -> None:
        self.before = before
        self.dead = False
        self.log: list[tuple[str, Any]] = []
        self.paths: dict[int, str] = {}
        self.files: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*arguments: Any, **named: Any) -> Any:
            if self.dead:
                raise CrashError
            try:
                self.before(len(self.log))
            except CrashError:
                self.dead = True
                raise
            about: Any = arguments[0]
            self.log.append((name, self.paths.get(about, about)))
            result: Any = None
            if name != "fsync":
                result = real(*arguments, **named)
            if name == "open":
                self.paths[result] = str(about)
            elif name == "fdopen":
                self.files.append(result)
            return result

        return call

    def end(self) -> None:
        """The files of a process are closed with it."""
        for file in self.files:
            with suppress(OSError):
                file.close()


@contextmanager
def system(before: Callable[[int], None] = lambda _: None) -> Iterator[System]:
    """Sinks that write files use this system; `before` is called with the number of each call."""
    made = System(before)
    with pytest.MonkeyPatch.context() as patch:
        for module in (staging, files, parquet):
            patch.setattr(module, "os", made)
        yield made
    made.end()


def crash_before(number: int) -> Callable[[int], None]:
    def before(call: int) -> None:
        if call == number:
            raise CrashError

    return before


def visible(directory: Path) -> dict[str, bytes]:
    """What a reader sees: whatever is not hidden by a dot."""
    if not directory.exists():
        return {}
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if not path.name.startswith(".")
    }


def staged(directory: Path) -> list[str]:
    """The files that nobody sees."""
    return sorted(path.name for path in directory.rglob("*.staged") if path.is_file())
