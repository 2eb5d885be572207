"""What may be relied on, on every disk; and what a local one does when it is full, or cannot be written."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from railgun.storage.errors import (
    DiskError,
    FullDiskError,
    LockedError,
    MissingError,
    ReadOnlyError,
    StorageError,
)
from railgun.storage.object_store import ArrowDisk, Disk, LocalDisk, open_disk
from railgun.testing.disks import SimulatedDisk

MAKERS: dict[str, Callable[[Path], Disk]] = {
    "local": LocalDisk,
    "simulated": lambda path: SimulatedDisk(),
    "arrow": lambda path: ArrowDisk(path.as_uri()),
    "arrow objects": lambda path: ArrowDisk("mock:///root"),
}


@pytest.fixture(params=MAKERS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return MAKERS[request.param](tmp_path / "root")


def test_what_is_written_is_read(disk: Disk) -> None:
    for data in (b"", b"hello", bytes(range(256)) * 5000):
        disk.write("a/b/c.bin", data)
        assert disk.read("a/b/c.bin") == data
    assert disk.exists("a/b/c.bin")
    assert not disk.exists("a/b")


def test_names_are_listed_below_a_directory_and_in_order(disk: Disk) -> None:
    assert disk.list("") == []
    for name in ("b/2", "a/x/1", "a/3", "top"):
        disk.write(name, b"x")
    assert disk.list("") == ["a/3", "a/x/1", "b/2", "top"]
    assert disk.list("a") == ["3", "x/1"]
    assert disk.list("a/x") == ["1"]
    assert disk.list("none/such") == []


def test_a_file_that_is_not_there_is_named(disk: Disk) -> None:
    for path in ("nothing", "no/where/at all"):
        with pytest.raises(MissingError, match=f"cannot read .*{path}: there is no such file"):
            disk.read(path)


def test_a_directory_is_no_file(disk: Disk) -> None:
    disk.write("a/b", b"x")
    with pytest.raises(DiskError):
        disk.read("a")


def test_deleting_twice_is_no_error(disk: Disk) -> None:
    disk.write("a/b", b"x")
    disk.delete("a/b")
    disk.delete("a/b")
    disk.delete("never/was")
    assert not disk.exists("a/b")
    assert disk.list("") == []
    disk.write("a/b", b"y")
    assert disk.read("a/b") == b"y"


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a/../../b", "a//b", "./a", "a/", "a\0b"])
def test_nothing_outside_can_be_reached(disk: Disk, path: str) -> None:
    with pytest.raises(StorageError, match="no path inside"):
        disk.write(path, b"x")
    with pytest.raises(StorageError, match="no path inside"):
        disk.read(path)


def test_who_comes_second_is_told_who_has_the_lock(disk: Disk) -> None:
    lock = disk.lock("flow/lock")
    assert lock.held()
    assert f"process {os.getpid()}" in (disk.holder("flow/lock") or "")
    with pytest.raises(LockedError, match=rf"flow/lock is held by process {os.getpid()} on "):
        disk.lock("flow/lock")
    assert lock.held()
    lock.release()
    lock.release()
    assert not lock.held()
    assert disk.holder("flow/lock") is None
    again = disk.lock("flow/lock")
    assert again.held()
    assert not lock.held()
    again.release()


# ------------------------------------------------------------ urls


def test_paths_and_file_urls_are_local(tmp_path: Path) -> None:
    for url in (str(tmp_path / "a b"), (tmp_path / "a b").as_uri()):
        disk = open_disk(url)
        assert isinstance(disk, LocalDisk)
        assert disk.root == tmp_path / "a b"
    assert isinstance(open_disk("mock:///root"), ArrowDisk)


def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    disk = open_disk("snapshots")
    monkeypatch.chdir("/")
    disk.write("x", b"1")
    assert (tmp_path / "snapshots" / "x").read_bytes() == b"1"


@pytest.mark.parametrize("url", ["gopher://x/y", "file://elsewhere/x"])
def test_a_url_nobody_opens_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match=url):
        open_disk(url)


# ------------------------------------------------------------ a local disk


def temporary_files(path: Path) -> list[Path]:
    return [found for found in path.rglob("*") if found.name.endswith(".tmp")]


def test_temporary_files_of_the_dead_are_not_listed(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    disk.write("a/b", b"x")
    (tmp_path / "a" / ".c.123.tmp").write_bytes(b"half")
    assert disk.list("") == ["a/b"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    contents = [bytes([n]) * 200_000 for n in range(20)]
    disk.write("f", contents[0])
    wrong: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            data = LocalDisk(tmp_path).read("f")
            if data not in contents:
                wrong.append(data[:10])

    reader = threading.Thread(target=read)
    reader.start()
    for content in contents:
        disk.write("f", content)
    done.set()
    reader.join()
    assert wrong == []


def test_writers_do_not_get_into_each_others_way(tmp_path: Path) -> None:
    """One disk and many threads, and directories that vanish in between."""
    disk, other = LocalDisk(tmp_path), LocalDisk(tmp_path)
    errors: list[Exception] = []

    def work(number: int) -> None:
        mine = disk if number % 2 else other
        try:
            for turn in range(30):
                mine.write(f"d/e/{number}", b"%d" % turn)
                assert mine.read(f"d/e/{number}") == b"%d" % turn
                mine.delete(f"d/e/{number}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert temporary_files(tmp_path) == []


def test_a_file_that_does_not_fit_leaves_all_as_it_was(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    disk.write("a", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for path in ("a", "new/b"):
            with pytest.raises(FullDiskError, match=rf"cannot write {tmp_path}/{path}: .* no room"):
                disk.write(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert disk.read("a") == b"old"
    assert disk.list("") == ["a"]
    assert temporary_files(tmp_path) == []
    disk.write("a", bytes(5000))


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 KiB."""
    at = tmp_path / "tiny"
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(at)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount")
    yield at
    subprocess.run(["umount", str(at)], check=True)


def test_a_disk_that_is_really_full_is_told_and_can_be_used_again(tiny: Path) -> None:
    disk = LocalDisk(tiny)
    disk.write("a", b"old")
    with pytest.raises(FullDiskError, match="Make room on that disk"):
        disk.write("b/c", bytes(200_000))
    assert disk.list("") == ["a"]
    assert temporary_files(tiny) == []
    disk.write("b/c", bytes(20_000))
    assert disk.read("a") == b"old"


def test_a_disk_mounted_read_only_is_told(tiny: Path) -> None:
    disk = LocalDisk(tiny)
    disk.write("a", b"old")
    subprocess.run(["mount", "-o", "remount,ro", str(tiny)], check=True)
    with pytest.raises(ReadOnlyError, match=rf"cannot write {tiny}/a: Read-only"):
        disk.write("a", b"new")
    with pytest.raises(ReadOnlyError, match="cannot delete"):
        disk.delete("a")
    disk.sync("")
    assert disk.read("a") == b"old"


def test_a_file_in_place_of_a_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("I am a file")
    disk = LocalDisk(tmp_path / "root")
    with pytest.raises(DiskError, match=rf"cannot write {tmp_path}/root/a/b: "):
        disk.write("a/b", b"x")
    with pytest.raises(DiskError):
        disk.lock("a/lock")
    assert (tmp_path / "root").read_text() == "I am a file"


def test_what_could_not_be_made_durable_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a manifest might be loaded, its sinks' output be committed, and then be gone after a power cut."""
    disk = LocalDisk(tmp_path)
    disk.write("m/1", b"x")
    sync, calls = os.fsync, []

    def fail_at_the_directory(file: int) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        sync(file)

    monkeypatch.setattr(os, "fsync", fail_at_the_directory)
    with pytest.raises(DiskError, match=r"m/2: Input/output error"):
        disk.write("m/2", b"y")
    assert disk.list("m") == ["1"]


def test_everything_is_synced_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    sync, rename = os.fsync, os.replace

    def fsync(file: int) -> None:
        told.append("sync " + os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), tmp_path))
        sync(file)

    def replace(old: Path, new: Path) -> None:
        told.append(f"rename to {os.path.relpath(new, tmp_path)}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    disk = LocalDisk(tmp_path / "root")
    disk.write("a/b/c", b"x")
    assert [line for line in told if ".tmp" not in line] == [
        *("sync .", "sync root", "sync root/a", "rename to root/a/b/c", "sync root/a/b")
    ]
    assert ".c." in told[3], "the content, before it gets its name"
    told.clear()
    disk.write("a/b/d", b"x")
    assert len(told) == 3, "directories that are known to be there for good are not synced again"
