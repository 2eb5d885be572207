"""A node that cannot write: it says so, another one is master in its place, and readers are served."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.broker.clustered import DEADLINE, Clustered, clustered, retried, until
from tests.broker.refusing import (
    alarms_of,
    becomes,
    has_alarm,
    has_no_alarm,
    health,
    is_told,
    shimmed,
)
from tests.broker.running import node, refused, run, stored, take
from verification.faults.shim import Control, Orders, ShimDisk
from verification.log_disk import LogDisk

from railgun.broker.cluster.errors import ClusterError
from railgun.broker.errors import LogFailedError, NoSpaceError, StorageError, storage_error
from railgun.broker.log.disk import NodeDisk
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.broker.streams import node as node_module
from railgun.client.client import connect
from railgun.client.errors import DuplicateIdError, StreamsError
from railgun.testing.disks import Crash
from railgun.transport.records import build

REFUSALS = [errno.EFBIG, errno.EDQUOT, errno.ENOSPC, errno.EROFS]


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at often."""
    monkeypatch.setattr(node_module, "CHECK_FILES_S", 0.05)


def refusing(disk: LogDisk, number: int) -> None:
    """Let all writes to this disk fail with an error."""

    def hook(step: str, path: str) -> None:
        if step == "write":
            raise OSError(number, os.strerror(number))

    disk.hook = hook


def put(log: StreamLog, payload: bytes) -> None:
    batch = build([payload])
    log.stamp([batch], 1, 0)
    log.append([batch])
    log.sync()


# ---------------------------------------------------------------- a log


@pytest.mark.parametrize("number", REFUSALS)
def test_a_log_remembers_a_refused_write_until_such_a_write_works(number: int) -> None:
    disk = LogDisk()
    log, _ = StreamLog.open(disk, "orders")
    put(log, b"first")
    refusing(disk, number)
    with pytest.raises(StorageError):
        put(log, bytes(1000))
    assert log.refused is not None
    assert log.failed is None
    with pytest.raises(StorageError):
        log.probe()
    disk.hook = None
    disk.room = disk.used() + 500  # not enough for what was refused
    with pytest.raises(NoSpaceError):
        log.probe()
    put(log, b"small")
    assert log.refused is not None
    disk.room = None
    log.probe()
    assert log.refused is None
    put(log, b"last")
    log.close()
    log, found = StreamLog.open(disk, "orders")
    assert (log.end, found.cut_bytes, found.damage) == (3, 0, None)


REMEDIES = {
    errno.ENOSPC: ("the disk is full", "Make room"),
    errno.EDQUOT: ("the disk quota", "Raise the quota"),
    errno.EFBIG: ("the file size limit", "ulimit -f"),
    errno.EROFS: ("read-only", "mount"),
    errno.EIO: ("the disk has failed", "dmesg"),
    errno.EACCES: ("permission", "chown"),
    errno.EMFILE: ("too many open files", "ulimit -n"),
}


@pytest.mark.parametrize("number", REMEDIES)
def test_what_a_disk_says_is_told_with_its_own_cause_and_remedy(number: int) -> None:
    disk = LogDisk()
    log, _ = StreamLog.open(disk, "orders")
    refusing(disk, number)
    with pytest.raises(StorageError) as written:
        put(log, b"first")
    made = storage_error(OSError(number, os.strerror(number)), "the stream 'a' cannot be made")
    for told in (str(written.value), str(made)):
        assert os.strerror(number) in told
        for other, words in REMEDIES.items():
            assert all((word in told) == (other == number) for word in words), told


def test_a_crash_in_the_middle_of_a_probe_leaves_a_whole_log() -> None:
    for at in range(4):
        disk = LogDisk(seed=at)
        log, _ = StreamLog.open(disk, "orders")
        put(log, b"first")
        refusing(disk, errno.EFBIG)
        with pytest.raises(NoSpaceError):
            put(log, bytes(1000))
        disk.hook = None
        disk.crash_at(at)
        with contextlib.suppress(Crash):
            log.probe()
        disk.hook = None
        disk.lose_power()
        log, found = StreamLog.open(disk, "orders")
        assert (log.end, found.damage) == (1, None)


def test_an_io_error_ends_a_log() -> None:
    disk = LogDisk()
    log, _ = StreamLog.open(disk, "orders")
    refusing(disk, errno.EIO)
    with pytest.raises(LogFailedError):
        put(log, b"first")
    assert log.failed is not None


def test_a_segment_that_cannot_be_made_is_trouble_until_it_can() -> None:
    disk = LogDisk()
    log, _ = StreamLog.open(disk, "orders", LogConfig(segment_bytes=100))
    put(log, b"first")

    def hook(step: str, path: str) -> None:
        if step == "create":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    disk.hook = hook
    with pytest.raises(StorageError):
        put(log, b"second")
    assert log.refused is not None
    disk.hook = None
    log.probe()
    assert log.refused is None
    put(log, b"second")


def test_nothing_is_acknowledged_into_a_file_that_was_removed(tmp_path: Path) -> None:
    log, _ = StreamLog.open(NodeDisk(tmp_path), "orders")
    put(log, b"first")
    shutil.rmtree(tmp_path / "orders")
    assert not log.has_file()
    with pytest.raises(LogFailedError, match="removed"):
        put(log, b"second")
    log.close()


# ---------------------------------------------------------------- a node that is alone


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EIO])
def test_a_node_says_at_its_end_what_could_not_be_written(tmp_path: Path, number: int) -> None:
    async def main() -> None:
        control = Control(None)
        disk = ShimDisk(NodeDisk(tmp_path), control)
        async with node(tmp_path, disk=disk) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.ensure("payments")
            control._orders = Orders(refuse=number)
            with pytest.raises(StreamsError):
                await client.publish("orders", b"0")
            assert running.server is not None
            lost, stopped = await running.server.stop(), running.server.node
            running.server = None
            told = stopped.refused_at_end if number == errno.EFBIG else lost
            assert len(told) == len(lost + stopped.refused_at_end) == 1
            assert "messages of stream 'orders'" in told[0]
            assert str(tmp_path) in told[0]
            assert "othing was stored" not in told[0]

    run(main())


def test_positions_of_groups_that_could_not_be_written_are_named_at_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        control = Control(None)
        async with node(tmp_path, disk=ShimDisk(NodeDisk(tmp_path), control)) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1"])
            sub = await client.subscribe("orders", group="mail")
            messages = await take(sub, 2)
            control._orders = Orders(refuse=errno.ENOSPC)
            sub.ack_all(messages)
            await refused("NO_SPACE", sub.flush())
            await refused("NO_SPACE", client.subscribe("orders", group="new"))  # nobody has it
            assert running.server is not None
            lost = await running.server.stop()
            running.server = None
            assert len(lost) == 1
            assert "positions of the groups 'mail' of stream 'orders'" in lost[0]

    run(main())


@pytest.mark.parametrize("number", REFUSALS)
def test_a_lone_node_that_cannot_write_is_not_healthy_until_it_can(
    tmp_path: Path, number: int
) -> None:
    async def main() -> None:
        disk = LogDisk()
        async with node(tmp_path, http_port=0, disk=disk) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"0")
            assert (await health(running.http_port))[0] == 200
            refusing(disk, number)
            code = "STORAGE" if number == errno.EROFS else "NO_SPACE"
            await refused(code, client.publish("orders", b"1"))
            told = await becomes(running.http_port, 503)
            assert "orders" in told["reasons"]
            assert (await client.describe("orders"))["trouble"]
            assert len(await take(await client.subscribe("orders"), 1)) == 1
            disk.hook = None
            await becomes(running.http_port, 200)  # without anybody who publishes
            assert not (await client.describe("orders"))["trouble"]
            assert await client.publish("orders", b"1") == 1

    run(main())


def test_a_removed_directory_of_a_stream_is_told_of_and_takes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:
            client = await running.client()
            for name in ("orders", "others"):
                await client.ensure(name)
                await client.publish(name, b"0")
            shutil.rmtree(tmp_path / "streams/orders")
            told = await becomes(running.http_port, 503)
            assert "removed" in told["reasons"]["orders"]
            await refused("LOG_FAILED", client.publish("orders", b"1"))
            assert await client.publish("others", b"1") == 1

    run(main())


_FULL_DISK = """
import asyncio, resource, signal, sys
from pathlib import Path
from railgun.broker.server.server import Server, ServerConfig
async def main():
    server = Server(ServerConfig(Path(sys.argv[1]), port=0, http_port=0))
    told = await server.start()
    print(server.port, server.http.port, len(told), flush=True)
    await asyncio.Event().wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
asyncio.run(main())
"""


def test_a_node_on_a_full_disk_starts_and_serves_readers(tmp_path: Path) -> None:
    """No byte can be written: the process must not make any file longer."""

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
        for path in tmp_path.rglob("format"):
            path.unlink()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _FULL_DISK, str(tmp_path)),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(DEADLINE):
                port, http_port, told = map(int, (await process.stdout.readline()).split())
            assert told == 1  # that node.json could not be written
            assert not (tmp_path / "node.json").exists()
            client = await connect(f"127.0.0.1:{port}", data=tmp_path)
            code, health_told = await health(http_port)  # at once: nobody has published yet
            assert code == 503
            assert "orders" in health_told["reasons"]
            assert len(await take(await client.subscribe("orders"), 10)) == 10
            await refused("NO_SPACE", client.publish("orders", b"10"))
            assert "orders" in (await becomes(http_port, 503))["reasons"]
            hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
            await becomes(http_port, 200)
            assert await client.publish("orders", b"10") == 10
            await client.close()
        finally:
            process.kill()
            await process.communicate()

    run(main(), deadline=3 * DEADLINE)


@contextlib.contextmanager
def mounted(at: Path) -> Iterator[Callable[[str], None]]:
    """Give a file system of its own, and what mounts it anew, as `ro` or `rw`."""

    def mount(*arguments: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return subprocess.run(["mount", *arguments, str(at)], capture_output=True).returncode
        return 1

    at.mkdir()
    if mount("-t", "tmpfs", "-o", "size=200m", "none"):
        pytest.skip("no file system can be mounted here")
    try:
        yield lambda mode: pytest.fail("it is in use") if mount("-o", f"remount,{mode}") else None
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.mark.parametrize("torn", [False, True])
def test_a_node_on_a_read_only_disk_starts_and_serves_readers(tmp_path: Path, torn: bool) -> None:
    async def main(data: Path, remount: Callable[[str], None]) -> None:
        async with node(data, http_port=0) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            secret = (data / "secret").read_text()
            await client.close()
            await running.stop()
            log = data / "streams/orders/log/00000000000000000000.log"
            if torn:
                with log.open("ab") as file:
                    file.write(bytes(100))
            remount("ro")
            before = log.read_bytes()
            await running.start()
            assert any("node.json" in one for one in running.told)
            told = await becomes(running.http_port, 503)
            assert "read-only" in told["reasons"]["orders"]
            client = await connect(f"127.0.0.1:{running.port}", secret=secret)
            assert len(await take(await client.subscribe("orders"), 10)) == 10
            code = "LOG_FAILED" if torn else "STORAGE"
            await refused(code, client.publish("orders", b"10"))
            await refused("STORAGE", client.ensure("others"))
            assert log.read_bytes() == before
            remount("rw")
            if torn:
                await running.again()
            await becomes(running.http_port, 200)
            assert await client.publish("orders", b"10") == 10
            await client.close()
            await running.again()
            assert running.told == []
            assert len(await stored(await running.client(), "orders")) == 11

    with mounted(tmp_path / "disk") as remount:
        run(main(tmp_path / "disk" / "data", remount))


def test_a_try_at_the_start_leaves_the_log_as_it_is_also_after_a_power_cut() -> None:
    for seed in range(5):
        disk = LogDisk(seed=seed)
        log, _ = StreamLog.open(disk, "orders")
        put(log, b"first")
        disk.lose_power()
        log, _ = StreamLog.open(disk, "orders")  # which tries
        assert log.refused is None
        if seed:
            put(log, b"second")
        disk.lose_power()
        log, found = StreamLog.open(disk, "orders")
        assert (log.end, found.damage) == (2 if seed else 1, None)
        put(log, b"next")


# ---------------------------------------------------------------- in a cluster


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_master_that_cannot_write_gives_way_to_one_that_can(tmp_path: Path, number: int) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            client, master = await cluster.serving("orders")
            await client.publish("orders", b"0")
            controls[master]._orders = Orders(refuse=number)
            await retried(lambda: client.publish("orders", b"1", id="1", timeout=5.0))
            await until(lambda: cluster.master() not in ("", master), "nobody follows")
            await has_alarm(client, "NODE_TROUBLE")
            status = await client.admin("cluster", DEADLINE)
            trouble = {one["name"]: bool(one["trouble"]) for one in status["nodes"]}
            assert trouble == {name: name == master for name in cluster.servers}
            controls[master]._orders = Orders()
            if number == errno.EIO:  # nobody knows what is on that disk
                await cluster.stop(master)
                await cluster.start(master)
            await has_no_alarm(client)
            await cluster.in_step("orders")
            assert cluster.copy(master, "orders").copy.end >= 2

    run(main(), deadline=4 * DEADLINE)


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("at_master", [False, True], ids=["at any node", "at the master"])
def test_publishers_see_no_error_when_a_master_cannot_write_and_another_node_can(
    tmp_path: Path, number: int, at_master: bool
) -> None:
    """Without IDs: what was refused was certainly not stored. A failed write (EIO) may be stored, so it takes IDs."""

    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            _, master = await cluster.serving("orders")
            others = [name for name in cluster.servers if name != master]
            nodes = [master, *others] if at_master else others
            done: list[bytes] = []
            stop = asyncio.Event()

            async def publisher(who: int) -> None:
                client, n = await cluster.client(*nodes), 0
                while not stop.is_set():
                    payload = b"%d-%d" % (who, n)
                    id = payload.decode() if number == errno.EIO else None
                    await client.publish("orders", payload, id=id, timeout=DEADLINE)
                    done.append(payload)
                    n += 1

            publishers = [asyncio.create_task(publisher(who)) for who in range(5)]
            await until(lambda: len(done) > 20, "nothing is published")
            controls[master]._orders = Orders(refuse=number)
            await until(lambda: cluster.master() not in ("", master), "nobody follows")
            before = len(done)
            await until(lambda: len(done) > before + 50, "nothing is published after that")
            stop.set()
            await asyncio.gather(*publishers)  # not one of them has seen an error
            reader = await cluster.client(*others)
            payloads = await stored(reader, "orders")
            assert sorted(payloads) == sorted(done)  # all that was acknowledged, and nothing twice
            for who in range(5):
                mine = [one for one in payloads if one.startswith(b"%d-" % who)]
                assert mine == [b"%d-%d" % (who, n) for n in range(len(mine))]

    run(main(), deadline=5 * DEADLINE)


def test_a_leader_that_answers_late_is_no_reason_to_refuse_a_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the leader may not say in time whether another node can be master."""

    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            _, master = await cluster.serving("orders")
            client = await cluster.client(master)
            regions = cluster.member(master).regions
            hand_over, late = regions.hand_over, [3]

            async def slowly(region: str) -> bool:
                if late[0]:
                    late[0] -= 1
                    raise ClusterError("DEADLINE", "the leader did not answer within 2 s")
                return await hand_over(region)

            monkeypatch.setattr(regions, "hand_over", slowly)
            controls[master]._orders = Orders(refuse=errno.ENOSPC)
            await client.publish("orders", b"1", timeout=DEADLINE)
            assert late[0] < 3
            assert cluster.master() != master

    run(main(), deadline=4 * DEADLINE)


def test_when_nobody_can_write_there_is_an_alarm_and_then_it_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            client, _ = await cluster.serving("orders")
            await client.publish("orders", b"0")
            for control in controls.values():
                control._orders = Orders(refuse=errno.EFBIG)
            await refused("NO_SPACE", client.publish("orders", b"1", timeout=5.0))
            await has_alarm(client, "NODE_TROUBLE")
            for control in controls.values():
                control._orders = Orders()
            await has_no_alarm(client)
            assert await retried(lambda: client.publish("orders", b"1", timeout=5.0)) == 1

    run(main(), deadline=4 * DEADLINE)


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EROFS, errno.EIO])
def test_a_replica_that_cannot_write_is_told_and_the_others_serve(
    tmp_path: Path, number: int
) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            client, master = await cluster.serving("orders")
            await client.publish("orders", b"0")
            await cluster.in_step("orders")
            late = next(name for name in cluster.servers if name != master)
            id = cluster.member(late).me
            controls[late]._orders = Orders(refuse=number)
            assert await client.publish("orders", b"1", timeout=DEADLINE) == 1
            told = await is_told(client, late)
            (alarm,) = [one for one in told["alarms"] if one["code"] == "NODE_TROUBLE"]
            assert late in alarm["text"]
            assert "'orders'" in alarm["text"]
            assert str(tmp_path / late) in alarm["text"]
            (region,) = told["regions"]
            assert region["master"] == cluster.member(master).me
            assert not region["lag"][id]["caught_up"]
            assert not told["settled"]
            assert "NO_QUORUM_SPARE" in {one["code"] for one in told["alarms"]}
            assert "NO_QUORUM" not in {one["code"] for one in told["alarms"]}
            assert await client.publish("orders", b"2", timeout=DEADLINE) == 2
            with pytest.raises(
                StreamsError
            ) as caught:  # who wants all of them need not wait for long
                await client.publish("orders", b"3", timeout=10 * DEADLINE, acks="all")
            assert caught.value.code == "NOT_ENOUGH_REPLICAS_AFTER_APPEND"
            assert late in str(caught.value)
            assert "othing was stored" not in str(caught.value)
            assert "in the master's log" in str(caught.value)

    run(main(), deadline=4 * DEADLINE)


@pytest.mark.parametrize("begun", [True, False], ids=["before", "after"])
def test_a_reader_at_a_replica_that_cannot_write_is_served_by_another_node(
    tmp_path: Path, begun: bool
) -> None:
    """A reader without a group that began before the disk refused, or begins after it, gets all messages."""

    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            client, master = await cluster.serving("orders")
            await client.publish("orders", b"0")
            await cluster.in_step("orders")
            late = next(name for name in cluster.servers if name != master)
            near = await cluster.client(late)
            reader = await near.subscribe("orders", start="start") if begun else None
            controls[late]._orders = Orders(refuse=errno.EFBIG)
            await client.publish("orders", b"1", timeout=DEADLINE)
            await is_told(client, late)
            if reader is None:
                reader = await near.subscribe("orders", start="start")
            await client.publish("orders", b"2", timeout=DEADLINE)
            found = [(await reader.next(DEADLINE)).payload for _ in range(3)]
            assert found == [b"0", b"1", b"2"]

    run(main(), deadline=4 * DEADLINE)


def test_publishers_leave_a_master_whose_raft_log_cannot_be_written_either(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            _, master = await cluster.serving("orders")
            client = await cluster.client(master)
            await client.publish("orders", b"0")
            await until(lambda: len(client._nodes) == 3, "it knows no others")
            other = cluster.member(next(name for name in cluster.servers if name != master))
            bad = cluster.member(master)
            controls[master]._orders = Orders(full=True)
            await until(lambda: bad.failed is not None, "it goes on")
            await until(
                lambda: other.metadata.regions["global"].master not in (None, bad.me),
                "nobody follows",
            )
            for number in range(1, 4):
                await client.publish("orders", b"%d" % number, timeout=DEADLINE)
            end = (await client.describe("orders"))["end"]
            assert end == 4

    run(main(), deadline=4 * DEADLINE)


@pytest.mark.parametrize("silent", [False, True], ids=["two cannot write", "one is silent"])
def test_when_too_few_replicas_can_write_publishes_fail_early_and_say_why(
    tmp_path: Path, silent: bool
) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            client, master = await cluster.serving("orders")
            await client.publish("orders", b"0", id="0")
            await cluster.in_step("orders")
            late, other = (name for name in cluster.servers if name != master)
            controls[late]._orders = Orders(refuse=errno.EFBIG)
            if silent:
                await cluster.kill(other)
            else:
                controls[other]._orders = Orders(refuse=errno.EFBIG)
            at_master = await cluster.client(master)
            with pytest.raises(StreamsError) as caught:  # long before its deadline
                await at_master.publish("orders", b"1", id="1", timeout=10 * DEADLINE)
            assert caught.value.code == "NOT_ENOUGH_REPLICAS_AFTER_APPEND"
            assert late in str(caught.value)
            assert "othing was stored" not in str(caught.value)
            assert "in the master's log" in str(caught.value)
            assert "limit" in str(caught.value)  # what its disk said
            for id in ("1", "2"):  # from now on at once: nothing is stored
                with pytest.raises(StreamsError) as caught:
                    await at_master.publish("orders", b"2", id=id, timeout=10 * DEADLINE)
                assert caught.value.code == "NOT_ENOUGH_REPLICAS"
            (alarm,) = await alarms_of(at_master, "NO_QUORUM")
            assert alarm["severity"] == "critical"
            assert "'orders'" in alarm["text"]
            assert late in alarm["text"]
            controls[late]._orders = Orders()
            assert await retried(lambda: at_master.publish("orders", b"2", id="2")) == 2
            with pytest.raises(DuplicateIdError):  # it was in the log of the master all the time
                await at_master.publish("orders", b"1", id="1")
            assert (await at_master.describe("orders"))["end"] == 3

    run(main(), deadline=8 * DEADLINE)


def test_a_replica_that_cannot_keep_a_promise_is_told(tmp_path: Path) -> None:
    """It follows no new master, though its streams could be written."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving("orders")
            await cluster.in_step("orders")
            late, heir = (name for name in cluster.servers if name != master)
            promises = tmp_path / late / "cluster/promises.json.new"
            promises.mkdir()  # so it cannot be written, also by root
            await client.admin("transfer", DEADLINE, node=heir, region="global")
            await retried(lambda: client.publish("orders", b"0", timeout=5.0))
            told = await is_told(client, late)
            (alarm,) = [one for one in told["alarms"] if one["code"] == "NODE_TROUBLE"]
            assert "promise" in alarm["text"]
            promises.rmdir()
            await has_no_alarm(client)

    run(main(), deadline=4 * DEADLINE)


def test_a_node_whose_directory_was_removed_is_nobodys_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving("orders")
            await client.publish("orders", b"0")
            shutil.rmtree(tmp_path / master / "streams")
            await until(lambda: cluster.master() not in ("", master), "nobody follows")
            await has_alarm(client, "NODE_TROUBLE")
            await retried(lambda: client.publish("orders", b"1", timeout=5.0))

    run(main(), deadline=4 * DEADLINE)


def test_a_node_of_a_cluster_that_cannot_write_when_it_starts_says_so_at_once(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            client, master = await cluster.serving("orders")
            await client.publish("orders", b"0")
            await cluster.in_step("orders")
            late = next(name for name in cluster.servers if name != master)
            await cluster.stop(late)
            controls[late]._orders = Orders(refuse=errno.EDQUOT)
            await cluster.start(late)
            at_others = await cluster.client(*(name for name in cluster.servers if name != late))
            (alarm,) = [
                one
                for one in (await is_told(at_others, late))["alarms"]
                if one["code"] == "NODE_TROUBLE"
            ]
            assert "'orders'" in alarm["text"]

    run(main(), deadline=4 * DEADLINE)


def test_a_node_whose_raft_log_was_removed_takes_no_part(tmp_path: Path) -> None:
    """Also if nothing is written: it would forget what it promises."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving("orders")
            late = next(name for name in cluster.servers if name != master)
            shutil.rmtree(tmp_path / late / "cluster")
            await until(lambda: cluster.member(late).failed is not None, "it goes on")
            await has_alarm(client, "RAFT_FAILED")

    run(main(), deadline=4 * DEADLINE)


def test_the_lag_of_a_replica_is_what_it_lacks(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(100)])
            await cluster.in_step("orders")
            silent = next(name for name in cluster.servers if name != master)
            id = cluster.member(silent).me
            await cluster.stop(silent)
            await retried(lambda: client.publish_many("orders", [b"x"] * 7))
            master = await cluster.ready("orders")

            def lag(region: str = "global") -> int:
                return int(cluster.member(master).regions.get(region).lags()[id])

            await until(lambda: lag() == 7, lambda: f"it lacks 7, and lags by {lag()}")

    run(main(), deadline=4 * DEADLINE)


def test_what_a_master_has_alone_is_lacking_on_the_others(tmp_path: Path) -> None:
    """Compared with the end of the master, not with what is safe: nothing is, without the others."""

    async def main() -> None:
        async with clustered(tmp_path, 2) as cluster:
            client, master = await cluster.serving("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            await cluster.in_step("orders")
            (other,) = set(cluster.servers) - {master}
            copy, id = cluster.copy(master, "orders"), cluster.member(other).me
            await cluster.kill(other)
            with pytest.raises((StreamsError, TimeoutError)):  # nobody acknowledges it
                await client.publish_many("orders", [b"x"] * 5, timeout=1.0)
            await until(lambda: copy.copy.durable >= 15, "the master has stored them")
            assert copy.lag(id) == copy.copy.durable - 10 > 0

    run(main(), deadline=4 * DEADLINE)
