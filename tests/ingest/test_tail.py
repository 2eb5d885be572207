"""Files that grow, pushed into a flow: whatever happens, its output is the lines of the files."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine, Iterator
from io import FileIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.ingest.ready_connectors import Fed, eventually, fed, running, stop

from railgun.ingest import Connector
from railgun.ingest.ready import tail
from railgun.ingest.ready.tail import MAX_LINE_BYTES, ReadResult, Tail, TailError


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[Fed]:
    with fed(tmp_path) as running_flow:
        yield running_flow


def lines_of(directory: Path) -> dict[str, list[bytes]]:
    """What has to come out: the whole lines of files."""
    found = {
        path.relative_to(directory).as_posix(): path.read_bytes().split(b"\n")[:-1]
        for path in directory.rglob("*")
        if path.is_file()
    }
    return {name: lines for name, lines in found.items() if lines}


# ---------------------------------------------------------------- reading


def read(path: Path, position: int, block: int, inode: tuple[int, int] | None) -> ReadResult:
    with FileIO(path) as file:
        return tail.read(file, str(path), position, block, inode)


def test_the_id_of_a_line_is_where_its_newline_stands(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\n\ntwo\r\nthr")
    look = read(path, 0, 4096, None)
    assert look.lines == [(3, b"one"), (4, b""), (9, b"two")]
    assert (look.end, look.size) == (10, 13)
    assert read(path, 5, 4096, look.inode).lines == [(9, b"two")]
    assert read(path, 10, 4096, look.inode).lines == []


def test_lines_are_found_whatever_the_block(tmp_path: Path) -> None:
    chance = Random(7)
    data = b"".join(b"x" * chance.choice((0, 1, 3, 50, 9000)) + b"\n" for _ in range(60))
    path = tmp_path / "a"
    path.write_bytes(data + b"rest")
    for block in (1, 2, 7, 100, 4096, 1 << 20):
        position, found = 0, []
        while lines := (look := read(path, position, block, None)).lines:
            found += lines
            position = look.end
        assert [line for _, line in found] == data.split(b"\n")[:-1]
        assert all(data[id_ : id_ + 1] == b"\n" for id_, _ in found)


def test_a_file_that_is_another_is_told_from_one_that_grew(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\ntwo\n")
    inode = read(path, 0, 10, None).inode
    path.write_bytes(b"one\n")
    with pytest.raises(TailError, match="truncated"):
        read(path, 8, 10, inode)
    path.write_bytes(b"a line that is longer\n")
    with pytest.raises(TailError, match="no end of a line at byte 7"):
        read(path, 8, 10, inode)
    path.with_name("b").write_bytes(b"one\ntwo\nthree\n")
    path.with_name("b").replace(path)
    with pytest.raises(TailError, match="another file"):
        read(path, 8, 10, inode)


def test_a_line_has_a_longest(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(TailError, match="more than"):
        read(path, 0, 1000, None)


# ---------------------------------------------------------------- names


class Taker:
    """In the place of a connector: takes what it is given."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.got: dict[str, list[bytes]] = {}
        self.again: set[str] = set()  # streams of which all is wanted once more, at their end

    async def feed(self, stream: str, source: Any) -> None:
        async for some in source(None):
            self.got.setdefault(stream, []).extend(line for _, line in some)
        if stream in self.again:
            self.again.remove(stream)
            await self.feed(stream, source)


class Following:
    """Files that are followed, and what comes of it."""

    def __init__(self, directory: Path, pattern: str = "*", **options: Any) -> None:
        self.taker = Taker()
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.tail = Tail(
            self.taker,  # type: ignore[arg-type]
            directory, pattern, poll=0.005,
            on_error=lambda stream, error: self.errors.append(f"{stream}: {error}"),
            on_warning=lambda stream, text: self.warnings.append(f"{stream}: {text}"), **options,
        )  # fmt: skip
        self.failed = self.tail.progress.failed

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.002)

    async def got(self, **want: list[bytes]) -> None:
        """Wait for these lines of `stream_log`."""
        named = {name.replace("_", "."): lines for name, lines in want.items()}
        await self.until(lambda: self.taker.got == named)

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def both() -> None:
            following = asyncio.create_task(self.tail.run())
            try:
                await asyncio.wait_for(work(), 20)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

        asyncio.run(both())


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_renamed_file_is_the_stream_it_was(tmp_path: Path) -> None:
    """And a new file under its old name is not: nothing is sent twice, and what is not sent is told."""
    old, new = tmp_path / "a.log", tmp_path / "a.log.1"
    old.write_bytes(b"1\n2\n")
    following = Following(tmp_path)

    async def work() -> None:
        await following.got(a_log=[b"1", b"2"])
        append(old, b"3\n")
        old.rename(new)
        old.write_bytes(b"another\n")
        append(new, b"4\n")
        await following.got(a_log=[b"1", b"2", b"3", b"4"])
        await following.until(lambda: "a.log" in following.failed and bool(following.warnings))
        append(new, b"5\n")  # by who has it open still
        await following.got(a_log=[b"1", b"2", b"3", b"4", b"5"])
        new.unlink()
        await following.until(lambda: following.tail._tasks["a.log"].done())

    following.run(work)
    [error], [warning] = following.errors, following.warnings
    assert f"{old} is another file now" in error
    assert f"{new} is the same file" in warning
    assert not following.tail._inodes


def test_what_was_appended_before_a_file_went_is_sent(tmp_path: Path) -> None:
    logs, away = tmp_path / "logs", tmp_path / "away"
    logs.mkdir()
    for name in ("deleted", "moved", "half"):
        (logs / f"{name}.log").write_bytes(b"1\n")
    following = Following(logs, "*.log")
    following.taker.again.add("deleted.log")

    async def work() -> None:
        await following.got(deleted_log=[b"1"], moved_log=[b"1"], half_log=[b"1"])
        append(logs / "deleted.log", b"2\n")
        (logs / "deleted.log").unlink()
        append(logs / "moved.log", b"2\n")
        (logs / "moved.log").rename(away)
        append(logs / "half.log", b"2\nhal")
        (logs / "half.log").unlink()
        both = [b"1", b"2"]
        # Of the deleted one all is wanted again: it is there until it is acknowledged.
        await following.got(deleted_log=both + both, moved_log=both, half_log=both)
        append(away, b"3\n")
        await following.got(deleted_log=both + both, moved_log=[*both, b"3"], half_log=both)
        await following.until(lambda: len(following.tail.files) == 1)

    following.run(work)
    assert following.failed.keys() == {"half.log"}
    assert "deleted before all of it was sent" in following.failed["half.log"]


def test_a_file_with_two_names_is_one_stream(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_bytes(b"1\n")
    (tmp_path / "current.log").symlink_to(tmp_path / "one.log")
    following = Following(tmp_path)

    async def work() -> None:
        await following.got(one_log=[b"1"])
        (tmp_path / "two.log").write_bytes(b"2\n")
        (tmp_path / "link").symlink_to(tmp_path / "two.log")
        (tmp_path / "link").replace(tmp_path / "current.log")
        await following.got(one_log=[b"1"], two_log=[b"2"])
        await following.until(lambda: len(following.warnings) >= 2)

    following.run(work)
    assert not following.failed


def test_files_beyond_those_that_can_be_open(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_bytes(b"1\n")
    following = Following(tmp_path)
    following.tail._may_be_open = 1

    async def work() -> None:
        await following.got(a_log=[b"1"], b_log=[b"1"])
        assert len(following.tail._open) == 1
        [closed] = set(following.tail.files.values()) - following.tail._open
        await following.until(lambda: closed.looked == 2)
        for name in ("a.log", "b.log"):
            (tmp_path / name).rename(tmp_path / f"{name}.1")
        await following.until(lambda: len(following.warnings) == 2)
        listed = tail.Listed("x", closed.size + 1, closed.mtime + 1, closed.inode)
        assert not closed.may_be(listed)  # an inode that is used again
        for name in ("a.log", "b.log"):
            append(tmp_path / f"{name}.1", b"2\n")
        await following.got(a_log=[b"1", b"2"], b_log=[b"1", b"2"])

    following.run(work)
    assert not following.failed


def test_what_cannot_be_read_is_tried_again(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "a.log").write_bytes(b"1\n")
    following = Following(tmp_path)
    real, trouble = tail.read, [True]

    def read(*given: Any) -> ReadResult:
        if trouble:
            raise OSError(errno.EIO, "Input/output error")
        return real(*given)

    monkeypatch.setattr(tail, "read", read)
    monkeypatch.setattr(tail, "RETRY_PAUSES_S", (0.001, 0.01))

    async def work() -> None:
        await following.until(lambda: "a.log" in following.failed)
        trouble.clear()
        await following.got(a_log=[b"1"])

    following.run(work)
    assert not following.failed
    [error] = following.errors
    assert "cannot be read: Input/output error" in error


# ---------------------------------------------------------------- real flows


def test_lines_come_once_also_if_the_command_is_run_again(flow: Fed, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (logs / "deep").mkdir(parents=True)
    for name in ("a.log", "b.log", "deep/c.log"):
        (logs / name).write_bytes(b"".join(b"%s %d\n" % (name.encode(), n) for n in range(3000)))
    (logs / "empty.log").touch()
    (logs / ".hidden.log").write_bytes(b"no\n")
    (logs / "other.txt").write_bytes(b"no\n")
    tail = ("tail", str(logs), "--pattern", "**/*.log", "--once")
    code, told = flow.type(*tail)
    assert code == 0, told
    assert told[-1]["progress"] == {
        "sent": 9000, "acknowledged": 9000, "streams": 4, "failed": 0,
    }  # fmt: skip
    (logs / ".hidden.log").unlink()
    (logs / "other.txt").unlink()
    flow.check(lines_of(logs))
    code, told = flow.type(*tail)
    assert (code, told[-1]["progress"]["sent"]) == (0, 0)
    with (logs / "b.log").open("ab") as file:
        file.write(b"more\nnot whole")
    code, told = flow.type(*tail)
    assert (code, told[-1]["progress"]["sent"]) == (0, 1)
    assert any("not complete" in one.get("warning", {}).get("message", "") for one in told)
    flow.check(lines_of(logs))


def test_files_grow_and_new_ones_come(flow: Fed, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    chance = Random(3)
    with running(flow.start("tail", str(logs), "--poll", "0.05", "--prefix", "here/")) as process:
        for turn in range(60):
            for _ in range(5):
                name = f"{chance.randrange(1 + turn // 10)}.log"
                with (logs / name).open("ab") as file:
                    cut = b"half of a line, "
                    file.write(b"".join(b"%d\n" % turn for _ in range(chance.randrange(200))) + cut)
            if turn % 20 == 10:
                count = flow.count()
                eventually(lambda count=count: flow.count() > count)  # type: ignore[misc]
        want = {f"here/{name}": lines for name, lines in lines_of(logs).items()}
        flow.check(want)
        for path in logs.iterdir():  # what was half is whole now
            with path.open("ab") as file:
                file.write(b"\n")
        want = {f"here/{name}": lines for name, lines in lines_of(logs).items()}
        flow.check(want)
        code, told = stop(process)
    assert code == 0
    assert told[-1]["stopped"]


@pytest.mark.slow
def test_a_killed_connector_goes_on_where_the_flow_is(flow: Fed, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in "abc":
        lines = (b"%s %d %s\n" % (name.encode(), n, b"x" * (n % 90)) for n in range(30_000))
        (logs / name).write_bytes(b"".join(lines))
    chance = Random(11)
    for _ in range(4):
        with running(flow.start("tail", str(logs), "--poll", "0.05")) as process:
            count = flow.count() + chance.randrange(1, 8_000)
            eventually(lambda count=count: flow.count() >= min(count, 85_000))  # type: ignore[misc]
            process.kill()
    code, told = flow.type("tail", str(logs), "--once")
    assert code == 0, told
    flow.check(lines_of(logs))


def test_a_flow_that_goes_back_gets_the_lines_again(flow: Fed, tmp_path: Path) -> None:
    """Also those of files that do not grow any more: nothing may wait for a next line."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("a", "b"):
        (logs / name).write_bytes(b"".join(b"%d\n" % n for n in range(10_000)))
    with running(flow.start("tail", str(logs), "--poll", "0.05")):
        for turn in range(2):
            with (logs / "a").open("ab") as file:
                file.write(b"".join(b"%d %d\n" % (turn, n) for n in range(5_000)))
            count = flow.count()
            eventually(lambda count=count: flow.count() > count)  # type: ignore[misc]
            flow.kill_worker()
        want = lines_of(logs)
        flow.check(want)


def test_a_truncated_or_replaced_file_fails_and_others_go_on(flow: Fed, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("cut", "good", "new", "gone"):
        (logs / name).write_bytes(b"one\ntwo\n")
    with running(flow.start("tail", str(logs), "--poll", "0.05")) as process:
        eventually(lambda: flow.count() == 8)
        os.truncate(logs / "cut", 4)
        (tmp_path / "other").write_bytes(b"one\ntwo\nthree\n")
        (tmp_path / "other").replace(logs / "new")
        (logs / "gone").unlink()
        with (logs / "good").open("ab") as file:
            file.write(b"three\n")
        eventually(lambda: flow.count() == 9)
        (logs / "late").write_bytes(b"one\n")
        eventually(lambda: flow.count() == 10)
        code, told = stop(process)
    assert code == 1
    failed = told[-1]["streams_failed"]
    assert failed.keys() == {"cut", "new"}
    assert "truncated" in failed["cut"]
    assert "another file" in failed["new"]
    assert flow.payloads()["good"] == [b"one", b"two", b"three"]
    code, told = flow.type("tail", str(logs), "--once")  # the flow knows how far the file was
    assert code == 1
    assert "truncated" in told[-1]["streams_failed"]["cut"]


def test_many_small_files(flow: Fed, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for n in range(1500):
        (logs / f"{n}.log").write_bytes(b"".join(b"%d %d\n" % (n, k) for k in range(n % 5)))
    code, told = flow.type("tail", str(logs), "--once")
    assert code == 0, told
    flow.check(lines_of(logs))
    assert told[-1]["progress"]["streams"] == 1500
    with running(flow.start("tail", str(logs))):
        (logs / "new.log").write_bytes(b"new\n")
        eventually(lambda: "new.log" in flow.payloads())
        for n in range(0, 1500, 37):
            with (logs / f"{n}.log").open("ab") as file:
                file.write(b"later\n")
        want = lines_of(logs)
        flow.check(want)


def test_one_file_may_be_followed_before_it_is_there(flow: Fed, tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    code, told = flow.type("tail", str(path), "--once")
    assert code == 1
    assert "cannot be read" in told[-1]["error"]["message"]
    with running(flow.start("tail", str(path), "--poll", "0.05")) as process:
        eventually(lambda: '"connected"' in (process.stdout.readline() if process.stdout else ""))
        path.write_bytes(b"here\n")
        eventually(lambda: flow.payloads() == {"one.log": [b"here"]})
        assert stop(process)[0] == 0


def test_a_function_that_waits_is_called_again_when_the_flow_goes_back(flow: Fed) -> None:
    """What `feed` is given may wait for ever: a flow that goes back does not wait for it."""
    positions: list[int | None] = []

    async def rows(por: int | None):  # type: ignore[no-untyped-def]
        positions.append(por)
        first = 0 if por is None else por + 1
        yield [(n, b"%d" % n) for n in range(first, 1000)]
        await asyncio.Event().wait()

    async def work() -> None:
        async with asyncio.timeout(60):
            connector = Connector(flow.name, registry=flow.registry)
            await connector.open()
            feeding = asyncio.create_task(connector.feed("s", rows))
            while len(positions) < 3:
                count = len(positions)
                while not count:
                    await asyncio.sleep(0.01)
                    count = len(positions)
                await asyncio.to_thread(flow.kill_worker)
                while len(positions) == count:
                    await asyncio.sleep(0.01)
            await connector.wait("s", 999)
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            await connector.close()

    asyncio.run(work())
    flow.check({"s": [b"%d" % n for n in range(1000)]})
