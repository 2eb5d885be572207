"""Locks against two jobs in one directory, with real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from railgun.storage.errors import LockedError
from railgun.storage.lock import Owner
from railgun.storage.object_store import ArrowDisk, Disk, LocalDisk
from railgun.storage.processes import FIRST_NAMESPACE

HOLD = """
import sys
from railgun.storage.object_store import ArrowDisk, LocalDisk
lock = {"local": LocalDisk, "arrow": ArrowDisk}[sys.argv[1]](sys.argv[2]).lock("lock")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["local", "arrow"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(kind: str, path: Path) -> Disk:
    return LocalDisk(path) if kind == "local" else ArrowDisk(path.as_uri())


def start_holder(kind: str, path: Path) -> subprocess.Popen[str]:
    where = str(path) if kind == "local" else path.as_uri()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, kind, where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_whose_holder_was_killed_is_taken_over(kind: str, tmp_path: Path) -> None:
    disk = opened(kind, tmp_path)
    with start_holder(kind, tmp_path) as holder:
        with pytest.raises(LockedError, match=rf"held by process {holder.pid} on .*, since 20"):
            disk.lock("lock")
        assert f"process {holder.pid} " in (disk.holder("lock") or "")
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
        assert disk.holder("lock") is None
        lock = disk.lock("lock")
        assert lock.held()
        lock.release()


def test_who_has_lost_the_lock_is_told(kind: str, tmp_path: Path) -> None:
    disk = opened(kind, tmp_path)
    lock = disk.lock("lock")
    disk.delete("lock")
    assert not lock.held()
    other = opened(kind, tmp_path).lock("lock")
    assert other.held()
    assert not lock.held()
    lock.release()
    assert other.held(), "giving up what is lost takes nothing from others"
    other.release()


def test_a_forked_child_does_not_hold_the_lock_and_does_not_free_it(tmp_path: Path) -> None:
    lock = LocalDisk(tmp_path).lock("lock")
    child = os.fork()
    if not child:
        os._exit(1 if lock.held() else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert lock.held()
    with pytest.raises(LockedError):
        LocalDisk(tmp_path).lock("lock")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    lock.release()
    LocalDisk(tmp_path).lock("lock").release()  # though the child lives
    os.close(reader)
    os.close(writer)
    os.waitpid(child, 0)


def test_of_a_process_on_another_host_nothing_is_known(tmp_path: Path) -> None:
    disk = ArrowDisk(tmp_path.as_uri())
    far = dataclasses.replace(Owner.me(), host="far-away", pid=1)
    disk.write("lock", far.as_bytes())
    with pytest.raises(
        LockedError,
        match=r"process 1 on far-away.* If you know that it is gone, delete file:.*lock",
    ):
        disk.lock("lock")


def test_a_number_that_another_process_has_now_is_recognised(tmp_path: Path) -> None:
    disk = ArrowDisk(tmp_path.as_uri())
    disk.write("lock", dataclasses.replace(Owner.me(), birth="1").as_bytes())
    disk.lock("lock").release()


@pytest.mark.parametrize(
    "other",
    [
        {"machine_id": "0" * 32},
        {"boot_id": "another kernel", "namespace": "pid:[4026532999]"},
        {"namespace": "pid:[4026532999]"},
        {"machine_id": "", "boot_id": "", "namespace": ""},  # of an older version
    ],
    ids=["machine", "kernel", "namespace", "unknown"],
)
def test_of_a_process_in_another_container_of_the_same_name_nothing_is_known(
    tmp_path: Path, other: dict[str, str]
) -> None:
    disk = ArrowDisk(tmp_path.as_uri())
    mine = Owner.me()
    if not mine.boot_id:
        pytest.skip("this system does not tell its kernel apart from others")
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    there = dataclasses.replace(mine, pid=gone.pid, birth="1", **other)  # type: ignore[arg-type]
    disk.write("lock", there.as_bytes())
    with pytest.raises(LockedError, match=r"If you know that it is gone, delete file:"):
        disk.lock("lock")
    assert disk.holder("lock") is not None


def test_a_process_from_before_the_machine_was_started_again_is_gone(tmp_path: Path) -> None:
    mine = Owner.me()
    if not mine.machine_id or mine.namespace != FIRST_NAMESPACE:
        pytest.skip("in a container a restart cannot be told from another machine")
    disk = ArrowDisk(tmp_path.as_uri())
    before = dataclasses.replace(mine, boot_id="before")
    disk.write("lock", before.as_bytes())
    disk.lock("lock").release()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", json.dumps({"host": 1}).encode()])
def test_a_file_that_names_nobody_is_taken_over(kind: str, tmp_path: Path, data: bytes) -> None:
    disk = opened(kind, tmp_path)
    disk.write("lock", data)
    assert disk.holder("lock") is None
    disk.lock("lock").release()
