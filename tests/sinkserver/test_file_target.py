"""A file as a target, and what can happen to it: power is lost, somebody changes it, its journal is damaged."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from railgun.ingest.errors import SinkError
from railgun.sinks.staging import sync_directory
from railgun.sinkserver.file_target import FileTarget
from railgun.sinkserver.staged import InMemoryRecords
from railgun.sinkserver.targets import TargetError


class Disk:
    """What a loss of power leaves: the bytes of a file, and the names in a directory, as of their last sync."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.promised = 0
        self.files: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.moments: list[tuple[int, dict[int, bytes], dict[int, dict[str, int]]]] = []

    def sync(self, handle: int) -> None:
        """In place of `os.fsync`."""
        path = Path(f"/proc/self/fd/{handle}").readlink()
        of = os.fstat(handle)
        if stat.S_ISDIR(of.st_mode):
            self.names[of.st_ino] = {one.name: one.stat().st_ino for one in path.iterdir()}
        else:
            self.files[of.st_ino] = path.read_bytes()
        self.remember()

    def remember(self) -> None:
        """Power may be lost here."""
        self.moments.append((self.promised, dict(self.files), dict(self.names)))

    def left(self, moment: int, where: Path) -> int:
        """Make what is left of it in another place; how many lines were promised by then."""
        promised, files, names = self.moments[moment]

        def make(number: int, path: Path) -> None:
            if number in names:
                path.mkdir()
                for name, one in names[number].items():
                    make(one, path / name)
            elif number in files:
                path.write_bytes(files[number])
            else:
                path.touch()  # or a directory of which nothing is known

        make(self.root.stat().st_ino, where)
        return promised


def test_whenever_power_is_lost_all_that_was_promised_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("railgun.sinkserver.file_target._REWRITE_LINES", 4)
    monkeypatch.setattr("railgun.sinkserver.file_target.REMEMBERED_TRANSACTIONS", 2)
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    disk.names[disk.root.stat().st_ino] = {}
    lines = [b"line %d" % n for n in range(6)]
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", disk.sync)
        target = FileTarget(disk.root / "new" / "deep" / "out.txt")
        target.open()
        target.path.unlink()  # somebody takes it away while nothing is in it
        sync_directory(target.path.parent)
        for n, line in enumerate(lines):
            target.apply(f"t{n}", InMemoryRecords([line]))
            disk.promised = n + 1
            disk.remember()
        target.close()
        patched.setattr(os, "fsync", lambda handle: None)
        for moment in range(len(disk.moments)):
            left = tmp_path / f"left{moment}"
            promised = disk.left(moment, left)
            if promised == 0 and not (left / "new" / "deep").is_dir():
                continue
            again = FileTarget(left / "new" / "deep" / "out.txt")
            again.open()
            found = again.path.read_bytes().splitlines()
            assert found in (lines[:promised], lines[: promised + 1]), f"moment {moment}"
            for n in range(max(0, promised - 1), len(lines)):
                again.apply(f"t{n}", InMemoryRecords([lines[n]]))
            again.close()
            assert again.path.read_bytes().splitlines() == lines
    assert len(disk.moments) > 3 * len(lines)


def test_a_journal_that_is_damaged_within_is_told_and_nothing_is_cut_off(tmp_path: Path) -> None:
    path, journal = tmp_path / "out.txt", tmp_path / ".out.txt.journal"
    target = FileTarget(path)
    target.open()
    for n in range(5):
        target.apply(f"t{n}", InMemoryRecords([b"line %d" % n]))
    target.close()
    whole, lines = path.read_bytes(), journal.read_bytes().splitlines(keepends=True)
    for at in range(len(lines) - 1):
        for bit in (
            0,
            len(lines[at]) // 2,
            len(lines[at]) - 1,
        ):  # the last one is the end of the line
            bad = bytearray(lines[at])
            bad[bit] ^= 1
            damaged = b"".join((*lines[:at], bad, *lines[at + 1 :]))
            if at == len(lines) - 2 and bit == len(bad) - 1:
                continue  # one line of two, at the end: so a torn one looks
            journal.write_bytes(damaged)
            with pytest.raises(SinkError, match="is damaged") as caught:
                target.open()
            assert caught.value.code == "BAD_JOURNAL"
            target.close()
            assert (path.read_bytes(), journal.read_bytes()) == (whole, damaged)
    journal.write_bytes(b"".join(lines))
    target.open()
    target.apply("t4", InMemoryRecords([b"line 4"]))
    target.close()
    assert path.read_bytes() == whole


def test_what_fails_leaves_no_files_open(tmp_path: Path) -> None:
    target = FileTarget(tmp_path / "out.txt")
    target.open()
    target.apply("t1", InMemoryRecords([b"one"]))
    target.path.write_bytes(b"")

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with pytest.raises(TargetError, match="another program has cut or"):
        target.apply("t2", InMemoryRecords([b"two"]))
    before = count()
    for _ in range(5):
        for way in (target.open, lambda: target.apply("t2", InMemoryRecords([b"two"]))):
            with pytest.raises(TargetError, match="another program has cut or"):
                way()
    assert count() == before
    target.path.write_bytes(b"one\n")
    target.apply("t2", InMemoryRecords([b"two"]))
    target.close()
    assert target.path.read_bytes() == b"one\ntwo\n"
