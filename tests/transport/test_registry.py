"""How jobs are found: files that only their user can read, and that do not outlive their job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.engine.controller.flows import counting, running, started

from railgun.storage.processes import birth_of
from railgun.transport.registry import Entry, JobRunsError, Registry, RegistryError


@pytest.fixture
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "some" / "jobs")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_the_user_can_read_it(registry: Registry, url: str) -> None:
    before = os.umask(0)
    try:
        registry.add(Entry.of_this_process("words", url, "secret"))
    finally:
        os.umask(before)
    assert mode(registry.directory) == 0o700
    assert {mode(path) for path in registry.directory.iterdir()} == {0o600}
    assert "secret" not in repr(registry.find("words"))


def test_a_directory_that_others_could_read_is_closed(registry: Registry, url: str) -> None:
    registry.directory.mkdir(parents=True, mode=0o755)
    registry.add(Entry.of_this_process("words", url, "secret"))
    assert mode(registry.directory) == 0o700


def test_a_name_belongs_to_one_running_job(registry: Registry, url: str) -> None:
    entry = Entry.of_this_process("words", url, "secret")
    registry.add(entry)
    with pytest.raises(JobRunsError, match=rf"process {os.getpid()} on .*railgun stop words"):
        registry.add(replace(entry, token="other"))
    assert registry.find("words") == entry
    registry.remove(entry)
    assert registry.find("words") is None
    registry.add(entry)


def test_a_job_removes_only_its_own_file(registry: Registry, url: str) -> None:
    entry = Entry.of_this_process("words", url, "secret")
    registry.add(entry)
    registry.remove(replace(entry, token="of an older one"))
    assert registry.find("words") == entry


def test_stale_files_are_recognised_and_removed(registry: Registry, url: str) -> None:
    entry = Entry.of_this_process("words", url, "secret")
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for stale in (
        replace(entry, pid=gone.pid),  # no such process
        replace(entry, birth="1"),  # another one has got its number
        replace(entry, url=nobody),  # it lives, and does not listen
    ):
        path = registry.directory / "words.json"
        registry.directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(stale)))
        assert registry.jobs() == []
        assert not path.exists()
        path.write_text(json.dumps(asdict(stale)))
        registry.add(entry)
        registry.remove(entry)


def test_a_job_on_another_machine_is_left_alone(registry: Registry, url: str) -> None:
    entry = replace(Entry.of_this_process("words", url, "secret"), machine="elsewhere", pid=1 << 30)
    registry.add(entry)
    assert registry.find("words") == entry
    with pytest.raises(JobRunsError, match="on elsewhere"):
        registry.add(Entry.of_this_process("words", url, "other"))


def test_a_job_in_another_container_of_the_same_name_is_left_alone(
    registry: Registry, url: str
) -> None:
    entry = Entry.of_this_process("words", url, "secret")
    if not entry.namespace:
        pytest.skip("this system does not tell namespaces apart")
    there = replace(entry, namespace="pid:[4026532999]", birth="1")
    registry.add(there)
    assert registry.find("words") == there
    with pytest.raises(JobRunsError):
        registry.add(entry)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "words"}', '{"surprise": 1}'])
def test_a_file_that_is_none_of_ours_is_no_job(registry: Registry, url: str, text: str) -> None:
    registry.directory.mkdir(parents=True)
    (registry.directory / "words.json").write_text(text)
    assert registry.jobs() == []
    registry.add(Entry.of_this_process("words", url, "secret"))


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a\0b"])
def test_names_stay_inside_the_directory(registry: Registry, name: str) -> None:
    with pytest.raises(RegistryError):
        registry.find(name)


def test_a_directory_that_cannot_be_used_is_told(tmp_path: Path, url: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryError, match="RAILGUN_JOBS"):
        Registry(tmp_path / "file").add(Entry.of_this_process("words", url, "secret"))


def test_the_default_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAILGUN_JOBS", str(tmp_path))
    assert Registry().directory == tmp_path
    monkeypatch.delenv("RAILGUN_JOBS")
    assert Registry().directory == Path.home() / ".railgun" / "jobs"


def test_processes_are_told_apart_by_their_birth() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert birth_of(other.pid) not in (None, birth_of(os.getpid()))
        other.kill()
        other.wait()
        assert birth_of(other.pid) is None


def test_a_second_job_of_a_name_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with started(counting("twice"), http=True, registry=tmp_path) as job:
        with (
            pytest.raises(JobRunsError, match="'twice' runs already"),
            started(counting("twice"), http=True, registry=tmp_path),
        ):
            pass
        running(job)
        with started(counting("twice"), http=True, registry=tmp_path, name="other") as other:
            assert other.name == "other"
            assert [entry.name for entry in Registry(tmp_path).jobs()] == ["other", "twice"]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
