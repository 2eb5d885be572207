"""Files that somebody moves, replaces, cuts off or removes: nothing is acknowledged into them, and the loss is told."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.broker.clustered import DEADLINE, clustered, retried, until
from tests.broker.refusing import becomes, has_alarm, has_no_alarm
from tests.broker.running import Running, node, process, refused, run, stored, take

from railgun.broker.cluster.wal import DamagedWalError, Wal
from railgun.broker.errors import LogFailedError
from railgun.broker.log.disk import NodeDisk
from railgun.broker.log.group_log import DamagedGroupLogError, Fold, GroupLog
from railgun.broker.log.log import StreamLog
from railgun.broker.log.tail import MARK
from railgun.broker.protocol.raft.messages import Entry, Hard, Members, Snapshot
from railgun.broker.streams import node as node_module
from railgun.client.client import connect
from railgun.client.errors import StreamsError
from railgun.transport.records import build

LONGEST = Fold[int](lambda n, change: max(n or 0, int(change)), lambda n: b"%d" % n, int)
LOG = "00000000000000000000.log"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at often."""
    monkeypatch.setattr(node_module, "CHECK_FILES_S", 0.05)


def put(log: StreamLog, payload: bytes) -> None:
    batch = build([payload])
    log.stamp([batch], 1, 0)
    log.append([batch])
    log.sync()


def moved(path: Path) -> None:
    """Somewhere else, and nothing is there any more."""
    path.rename(path.with_name(path.name + ".away"))


def copied_back(path: Path) -> None:
    """Somewhere else, and a copy is there."""
    moved(path)
    away = path.with_name(path.name + ".away")
    if away.is_file():
        shutil.copy(away, path)
    else:
        shutil.copytree(away, path, ignore=shutil.ignore_patterns("*.sock"))


def removed(path: Path) -> None:
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


WAYS = pytest.mark.parametrize("change", [moved, copied_back, removed])


# ---------------------------------------------------------------- moved, replaced


@WAYS
@pytest.mark.parametrize("what", ["orders", f"orders/{LOG}", ""], ids=["directory", "file", "all"])
def test_nothing_is_acknowledged_into_a_log_that_is_not_at_its_place(
    tmp_path: Path, change: Callable[[Path], None], what: str
) -> None:
    root = tmp_path / "data"
    log, _ = StreamLog.open(NodeDisk(root), "orders")
    put(log, b"first")
    assert log.has_file()
    change(root / what if what else root)
    assert not log.has_file()
    with pytest.raises(LogFailedError, match="removed"):
        put(log, b"second")
    log.close()


@WAYS
def test_nothing_is_acknowledged_into_a_group_log_that_is_not_at_its_place(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    log, _ = GroupLog.open(NodeDisk(tmp_path), "groups", LONGEST)
    log.append([("billing", b"3")])
    log.sync()
    log.replace({"billing": 4})  # it is another file now, which was made under another name
    assert log.has_file()
    log.append([("billing", b"5")])
    log.sync()
    change(tmp_path / "groups")
    assert not log.has_file()
    log.append([("billing", b"6")])
    with pytest.raises(LogFailedError, match="removed"):
        log.sync()


@WAYS
def test_a_log_of_raft_that_is_not_at_its_place_is_missing(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    wal, _ = Wal.open(NodeDisk(tmp_path), "raft")
    wal.write(None, Snapshot(0, 0, Members(("a",))), ())
    wal.write(Hard(1, "a"), None, [Entry(1, 1)])
    wal.sync()
    wal.compact(Snapshot(1, 1, Members(("a",))))
    assert wal.has_file()
    change(tmp_path / "raft")
    assert not wal.has_file()
    wal.write(None, None, [Entry(2, 1)])
    with pytest.raises(LogFailedError):
        wal.sync()


@pytest.mark.parametrize("change", [moved, copied_back])
def test_a_stream_whose_directory_was_moved_takes_nothing_and_says_so(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:
            client = await running.client()
            for name in ("orders", "others"):
                await client.ensure(name)
                await client.publish(name, b"0")
            change(tmp_path / "streams/orders")
            told = await becomes(running.http_port, 503)
            assert "moved" in told["reasons"]["orders"]
            await refused("LOG_FAILED", client.publish("orders", b"1"))
            assert len(await take(await client.subscribe("orders"), 1)) == 1
            assert await client.publish("others", b"1") == 1
            assert running.server is not None
            lost = await running.server.stop()
            running.server = None
            assert any("'orders'" in one for one in lost)

    run(main())


@WAYS
def test_a_node_whose_data_directory_was_moved_makes_and_changes_nothing(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    data = tmp_path / "data"

    async def main() -> None:
        async with node(data, http_port=0) as running:
            client = await running.client()
            await client.ensure("noise", kind="ephemeral")
            change(data)
            told = await becomes(running.http_port, 503)
            assert str(data) in told["reasons"]["DATA_GONE"]
            assert [one["code"] for one in told["alarms"]] == ["DATA_GONE"]
            await refused("STORAGE", client.ensure("orders"))
            await refused("STORAGE", client.delete("noise"))
            assert not (data / "streams/orders").exists()
            assert running.server is not None
            lost = await running.server.stop()
            running.server = None
            assert any(str(data) in one for one in lost)

    run(main())


@pytest.mark.parametrize("change", [moved, copied_back])
def test_a_master_whose_files_were_moved_is_followed_by_another(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving("orders")
            await client.publish("orders", b"0")
            await cluster.in_step("orders")
            change(tmp_path / master / "streams/orders")
            await until(lambda: cluster.master() not in ("", master), "nobody follows")
            await has_alarm(client, "NODE_TROUBLE")
            await retried(lambda: client.publish("orders", b"1", id="1", timeout=5.0))
            await cluster.stop(master)
            await cluster.start(master)
            await has_no_alarm(client)
            await cluster.in_step("orders")
            assert await stored(await cluster.client(master), "orders") == [b"0", b"1"]

    run(main(), deadline=5 * DEADLINE)


# ---------------------------------------------------------------- cut off


def sizes(file: Path) -> list[int]:
    """Return where to cut off a file: to nothing, in the middle of it, and where its last mark is."""
    data = file.read_bytes()
    return [0, len(data) // 2, data.rfind(MARK), len(data) - 1]


@pytest.mark.parametrize("which", range(4))
def test_nothing_is_acknowledged_into_a_log_that_was_made_shorter(
    tmp_path: Path, which: int
) -> None:
    log, _ = StreamLog.open(NodeDisk(tmp_path), "orders")
    for payload in (b"first", b"second", b"third"):
        put(log, payload)
    file = tmp_path / "orders" / LOG
    os.truncate(file, sizes(file)[which])
    assert not log.has_file()
    with pytest.raises(LogFailedError, match="shorter"):
        put(log, b"fourth")
    assert log.failed is not None
    log.close()


def test_a_stream_whose_log_was_made_shorter_takes_nothing_and_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"0")
            os.truncate(tmp_path / "streams/orders/log" / LOG, 0)
            told = await becomes(running.http_port, 503)
            assert "shorter" in told["reasons"]["orders"]
            await refused("LOG_FAILED", client.publish("orders", b"1"))

    run(main())


def cut_out(file: Path, begin: int, end: int) -> bytes:
    """Take bytes out of a file, as if it had been cut off and then been written to; return what it has then."""
    data = file.read_bytes()
    file.write_bytes(data[:begin] + data[end:])
    return file.read_bytes()


def marks(data: bytes) -> list[int]:
    """Return where the marks are."""
    found = [at for at in range(len(data)) if data[at : at + 4] == MARK]
    assert len(found) > 2
    return found


@pytest.mark.parametrize("whole", [True, False], ids=["at a batch", "inside of a batch"])
@pytest.mark.parametrize("first", [0, 1])
def test_batches_behind_missing_bytes_are_damage_and_not_cut_off(
    tmp_path: Path, first: int, whole: bool
) -> None:
    log, _ = StreamLog.open(NodeDisk(tmp_path), "orders")
    for n in range(5):
        put(log, b"%d" % n)
    log.close()
    file = tmp_path / "orders" / LOG
    at = marks(file.read_bytes())
    begin = (0 if first == 0 else at[0]) + (0 if whole else 40)
    left = cut_out(file, begin, at[2])
    log, found = StreamLog.open(NodeDisk(tmp_path), "orders")
    assert found.damage is not None
    assert found.cut_bytes == 0
    assert (log.end, file.read_bytes()) == (first, left)
    log.close()
    assert file.read_bytes() == left


@pytest.mark.parametrize("inside", [0, 10])
def test_changes_of_groups_behind_missing_bytes_are_damage_and_not_cut_off(
    tmp_path: Path, inside: int
) -> None:
    log, _ = GroupLog.open(NodeDisk(tmp_path), "groups", LONGEST)
    for n in range(5):
        log.append([("billing", b"%d" % n)])
        log.sync()
    log.close()
    file = tmp_path / "groups/groups"
    at = marks(file.read_bytes())
    left = cut_out(file, at[0] + (24 + inside if inside else 0), at[2])
    with pytest.raises(DamagedGroupLogError):
        GroupLog.open(NodeDisk(tmp_path), "groups", LONGEST)
    assert file.read_bytes() == left


def test_a_log_of_raft_with_missing_bytes_is_damaged_and_not_cut_off(tmp_path: Path) -> None:
    wal, _ = Wal.open(NodeDisk(tmp_path), "raft")
    wal.write(None, Snapshot(0, 0, Members(("a",))), ())
    for n in range(1, 5):
        wal.write(None, None, [Entry(n, 1, b"x")])
        wal.sync()
    wal.close()
    file = tmp_path / "raft/wal"
    at = marks(file.read_bytes())
    left = cut_out(file, at[1], at[3])
    with pytest.raises(DamagedWalError):
        Wal.open(NodeDisk(tmp_path), "raft")
    assert file.read_bytes() == left


def test_a_torn_end_whose_messages_hold_marks_is_cut_off(tmp_path: Path) -> None:
    """Somebody publishes the files of a log as messages, and the power is gone."""
    log, _ = StreamLog.open(NodeDisk(tmp_path), "orders")
    for n in range(5):
        put(log, b"%d" % n)
    log.close()
    file = tmp_path / "orders" / LOG
    size, copy = file.stat().st_size, file.read_bytes()
    log, _ = StreamLog.open(NodeDisk(tmp_path), "orders")
    put(log, copy)
    os.truncate(file, size + len(copy))  # the node is gone
    log, found = StreamLog.open(NodeDisk(tmp_path), "orders")
    assert found.damage is None
    assert found.cut_bytes > 0
    assert log.end == 5
    log.close()


# ---------------------------------------------------------------- cut off or removed while the node is stopped


async def filled(running: Running) -> None:
    """Three messages, of which a group has acknowledged two."""
    client = await running.client()
    await client.ensure("orders")
    for n in range(3):
        await client.publish("orders", b"%d" % n)
    sub = await client.subscribe("orders", group="billing")
    sub.ack_all(await take(sub, 2))
    await sub.flush()
    await client.close()


async def lacks(running: Running, end: int) -> None:
    """The node says that messages from this offset on are missing, and takes no others in their place."""
    told = await becomes(running.http_port, 503)
    assert "orders" in told["reasons"]
    assert any("'orders'" in one for one in running.told)
    client = await running.client()
    await refused("LOG_DAMAGED", client.publish("orders", b"another"))
    assert (await client.describe("orders"))["end"] == end
    sub = await client.subscribe("orders")
    assert [one.payload for one in await take(sub, end)] == [b"%d" % n for n in range(end)]
    with pytest.raises(StreamsError) as caught:
        await sub.next(DEADLINE)
    assert caught.value.code == "LOG_DAMAGED"
    await client.close()


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_messages_that_are_missing_at_the_start_are_told_and_not_replaced(
    tmp_path: Path, kept: int
) -> None:
    file = tmp_path / "streams/orders/log" / LOG

    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:
            await filled(running)
            await running.stop()
            size = [0, *marks(file.read_bytes())][kept]
            os.truncate(file, size)
            for _ in range(2):  # it is not forgotten
                await running.start()
                await lacks(running, kept)
                await running.stop()
            assert file.stat().st_size == size
            (told,) = [one for one in running.told if "'orders'" in one]
            groups = tmp_path / "streams/orders/groups/groups"
            assert str(groups) in told  # which can be removed, to go on without what is missing
            groups.unlink()
            await running.start()
            assert running.told == []
            client = await running.client()
            assert await client.publish("orders", b"another") == kept

    run(main())


def test_what_a_group_has_acknowledged_is_missed_after_a_kill(tmp_path: Path) -> None:
    async def main() -> None:
        async with process(tmp_path) as killed:
            client = await connect(f"127.0.0.1:{killed.port}", data=tmp_path)
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1"])
            sub = await client.subscribe("orders", group="billing")
            sub.ack_all(await take(sub, 2))
            await sub.flush()
            await killed.kill()
            await client.close()
        os.truncate(tmp_path / "streams/orders/log" / LOG, 0)
        async with node(tmp_path, http_port=0) as running:
            await lacks(running, 0)

    run(main())


@pytest.mark.parametrize("what", ["log", f"log/{LOG}"])
def test_a_stream_without_its_log_is_not_opened_as_an_empty_one(tmp_path: Path, what: str) -> None:
    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:
            await filled(running)
            await running.stop()
            removed(tmp_path / "streams/orders" / what)
            for _ in range(2):
                await running.start()
                (told,) = running.told
                assert "'orders'" in told
                assert str(tmp_path / "streams/orders/log") in told
                health_told = await becomes(running.http_port, 503)
                assert "orders" in health_told["reasons"]
                assert [one["code"] for one in health_told["alarms"]] == ["NOT_OPENED"]
                client = await running.client()
                await refused("LOG_DAMAGED", client.publish("orders", b"another"))
                await refused("LOG_DAMAGED", client.subscribe("orders"))
                await refused("LOG_DAMAGED", client.ensure("orders"))
                await client.close()
                await running.stop()

    run(main())


def several_segments(root: Path) -> list[str]:
    """Return the names of the segments of a log with three messages, one in each."""
    log, _ = StreamLog.open(NodeDisk(root), "orders")
    for n in range(3):
        put(log, b"%d" % n)
        if n < 2:
            log.roll()
    log.close()
    return [one.name for one in sorted((root / "orders").glob("*.log"))]


@pytest.mark.parametrize("count", [1, 2])
def test_the_last_segments_are_missed(tmp_path: Path, count: int) -> None:
    names = several_segments(tmp_path)
    for name in names[-count:]:
        (tmp_path / "orders" / name).unlink()
    for _ in range(2):
        log, found = StreamLog.open(NodeDisk(tmp_path), "orders")
        assert found.damage is not None
        assert found.damage.offset == log.end == 3 - count
        log.close()


def test_messages_before_which_others_were_purged_are_missed(tmp_path: Path) -> None:
    log, _ = StreamLog.open(NodeDisk(tmp_path), "orders")
    for n in range(3):
        put(log, b"%d" % n)
    assert log.purge(2) == 2
    log.close()
    os.truncate(tmp_path / "orders" / LOG, 0)
    for _ in range(2):
        log, found = StreamLog.open(NodeDisk(tmp_path), "orders")
        assert found.damage is not None
        log.close()


# ---------------------------------------------------------------- streams that cannot be opened


def test_a_stream_with_settings_of_a_later_version_is_told_as_such(tmp_path: Path) -> None:
    settings = tmp_path / "streams/orders/stream.json"

    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:
            await filled(running)
            await running.stop()
            told_before = settings.read_text()
            settings.write_text(json.dumps(json.loads(told_before) | {"later": 1}))
            await running.start()
            told = await becomes(running.http_port, 503)
            assert "'later'" in told["reasons"]["orders"]
            assert [one["code"] for one in told["alarms"]] == ["NOT_OPENED"]
            client = await running.client()
            calls = (
                lambda: client.publish("orders", b"another"),
                lambda: client.subscribe("orders"),
                lambda: client.ensure("orders"),
                lambda: client.describe("orders"),
                lambda: client.delete("orders"),
            )
            for call in calls:
                error = await refused("LATER_VERSION", call())
                assert str(settings) in str(error)
                assert "other nodes" not in str(error)
            await client.ensure("others")
            assert await client.publish("others", b"0") == 0
            await client.close()
            await running.stop()
            settings.write_text(told_before)
            await running.start()
            assert await stored(await running.client(), "orders") == [b"0", b"1", b"2"]

    run(main())
