"""Files that grow, pushed into a flow: whatever happens, its output is the lines of the files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.connector.ready import Fed, eventually, fed, running, stop

from railgun.connector import Connector
from railgun.connector.ready.tail import LONGEST, TailError, read


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
    path.write_bytes(b"x" * (LONGEST + 1))
    with pytest.raises(TailError, match="more than"):
        read(path, 0, 1000, None)


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
