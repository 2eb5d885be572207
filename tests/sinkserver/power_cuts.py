"""Power cuts for programs that use the system's files: whatever they do in a directory is done on a `LogDisk`, too.

`cut` then makes another directory of what such a disk has after a power cut: of what was not synced, each name and each
part of a file is there or is not, as a seeded die falls. A program may also be gone before any of its steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verification.log_disk import LogDisk

from railgun.broker.log.disk import File
from railgun.testing.disks import Crash, crash_hook


class Power:
    """Follows what happens in a directory, until the power is cut."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path, seed: int) -> None:
        self.root = root
        self.disk = LogDisk(seed)
        self.steps = 0
        self._dead = False
        self._files: dict[int, File] = {}
        self._directories: dict[int, str] = {}
        self._real: dict[str, Callable[..., Any]] = {}
        names = "open close write pwrite ftruncate truncate fsync rename unlink"
        for name in names.split():
            self._real[name] = getattr(os, name)
            patch.setattr(os, name, getattr(self, f"_{name}"))
        patch.setattr(Path, "write_bytes", lambda path, data: self._write_bytes(path, data))
        for path in root.rglob("*"):
            if path.is_file():
                self.disk.replace(str(self._name(path)), path.read_bytes())
        self.disk.hook = self._step

    def crash_at(self, step: int) -> None:
        """Let the program be gone before the step of this number, counted from now on."""
        crash = crash_hook(step, self._die)

        def hook(name: Any, path: str) -> None:
            self._step(name, path)
            crash(name, path)

        self.disk.hook = hook

    def cut(self, into: Path) -> None:
        """The power is gone. What is left is in a new directory."""
        self.disk.lose_power()
        for path in self.disk._names.seen:
            made = into / path.removeprefix("top/")
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_bytes(self.disk.content(path))

    def _die(self) -> None:
        self._dead = True

    def _step(self, name: Any, path: str) -> None:
        self.steps += 1
        if self._dead:  # whatever it does on its way out
            raise Crash(f"{name} of {path}")

    def _name(self, path: Any) -> str | None:
        found = Path(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
        if found is None or not (found == self.root or found.is_relative_to(self.root)):
            return None
        return str(Path("top") / found.relative_to(self.root))

    # ------------------------------------------------------------ what programs call

    def _open(self, path: Any, flags: int, *more: Any, **others: Any) -> int:
        name = self._name(path)
        there = name is not None and os.path.exists(path)
        file: int = self._real["open"](path, flags, *more, **others)
        if name is not None:
            if os.path.isdir(path):
                self._directories[file] = name
            elif not there or flags & os.O_TRUNC:
                self._files[file] = self.disk.create(name)
            else:
                self._files[file] = self.disk.open(name)
        return file

    def _close(self, file: int) -> None:
        self._files.pop(file, None)
        self._directories.pop(file, None)
        self._real["close"](file)

    def _write(self, file: int, data: Any) -> int:
        if file in self._files:
            self._files[file].write([bytes(data)])
        written: int = self._real["write"](file, data)
        return written

    def _pwrite(self, file: int, data: Any, at: int) -> int:
        if file in self._files:
            assert at == self._files[file].size(), "not at the end"
            self._files[file].write([bytes(data)])
        written: int = self._real["pwrite"](file, data, at)
        return written

    def _ftruncate(self, file: int, size: int) -> None:
        if file in self._files:
            self._files[file].truncate(size)
        self._real["ftruncate"](file, size)

    def _truncate(self, path: Any, size: int) -> None:
        name = self._name(path)
        if name is not None:
            self.disk.open(name).truncate(size)
        self._real["truncate"](path, size)

    def _fsync(self, file: int) -> None:
        if file in self._files:
            self._files[file].sync()
        elif file in self._directories:
            self.disk.sync_directory(self._directories[file])

    def _rename(self, path: Any, to: Any) -> None:
        one, other = self._name(path), self._name(to)
        if one is not None and other is not None:
            self.disk.rename(one, other)
        self._real["rename"](path, to)

    def _unlink(self, path: Any, **others: Any) -> None:
        name = self._name(path)
        if name is not None and os.path.exists(path):
            self.disk.remove(name)
        self._real["unlink"](path, **others)

    def _write_bytes(self, path: Path, data: bytes) -> int:
        name = self._name(path)
        if name is not None:
            self.disk.create(name).write([data])
        with path.open("wb") as file:
            return file.write(data)
