"""Data of a later version of Railgun: refused by name, and not a byte of it changed."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.broker.running import node, run
from verification.log_disk import LogDisk
from zlib_ng.zlib_ng import crc32

from railgun.broker.cluster import identity
from railgun.broker.cluster.wal import DamagedWalError, Wal
from railgun.broker.errors import LaterFormatError
from railgun.broker.log.disk import NodeDisk
from railgun.broker.log.group_log import GroupLog
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.broker.log.notes import pack
from railgun.broker.log.segment import index_name, log_name
from railgun.broker.log.tail import mark
from railgun.broker.protocol.groups import Saved, Settled, Unsettled
from railgun.broker.protocol.groups.messages import Standing
from railgun.broker.protocol.raft.messages import Entry, Hard, Members, Snapshot
from railgun.broker.streams import groups
from railgun.broker.streams.retime import retime
from railgun.engine.snapshots.errors import FormatError
from railgun.engine.snapshots.manifest import Manifest, seal
from railgun.engine.snapshots.store import SnapshotStore
from railgun.errors import LaterVersionError
from railgun.ingest.errors import SinkError
from railgun.sinkserver.ledger import Ledger
from railgun.storage.formats import FORMAT_FILE, Format, OtherFormatError
from railgun.transport.records import Records, build, head, patch

Change = Callable[[bytearray], None]


def everything_in(directory: Path) -> dict[str, bytes]:
    """All files below a directory, but for the lock and the socket of a process."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("lock", "secret")
    }


def unknown_flag(batch: bytearray) -> None:
    struct.pack_into("<H", batch, 44, 32)


def unknown_field(batch: bytearray) -> None:
    batch[46] = 1


def unknown_version(batch: bytearray) -> None:
    batch[:4] = b"RGB2"


def later_batch(change: Change, base: int, payload: bytes = b"later") -> bytes:
    """A batch as a later version would write it: whole, with checksums that fit."""
    batch = build([payload])
    patch(batch, base, 1, 1_000)
    change(batch)
    begin = 0 if batch[:4] == b"RGB1" else crc32(batch[:4])  # as the rules of records.py say
    struct.pack_into("<I", batch, 8, crc32(batch[12:64], begin))
    return bytes(batch)


changes = pytest.mark.parametrize("change", [unknown_flag, unknown_field, unknown_version])


# ---------------------------------------------------------------- the log of a stream


def written(disk: NodeDisk, config: LogConfig | None = None, count: int = 3) -> None:
    log, _ = StreamLog.open(disk, "orders", config)
    for n in range(count):
        batch = build([b"message %d" % n])
        log.stamp([batch], 1, n)
        log.append([batch])
        log.sync()
    log.close()


@changes
def test_a_last_batch_of_a_later_version_is_not_cut_off(tmp_path: Path, change: Change) -> None:
    disk = NodeDisk(tmp_path)
    written(disk)
    with (tmp_path / "orders" / log_name(0)).open("ab") as file:
        file.write(later_batch(change, 3))
    before = everything_in(tmp_path)
    with pytest.raises(LaterFormatError, match="later version of Railgun"):
        StreamLog.open(disk, "orders")
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(
    "version", [b"2", b"3", b"5", b"9"]
)  # all but the first differ from 1 by one bit
@pytest.mark.parametrize("size", [4, 40, 64, 200])
def test_a_last_batch_of_a_later_version_with_rules_we_do_not_know_is_not_cut_off(
    tmp_path: Path, version: bytes, size: int
) -> None:
    """Its header and its checksum may be anything: the first four bytes are whole, and say that it is none of ours."""
    disk = NodeDisk(tmp_path)
    written(disk)
    path = tmp_path / "orders" / log_name(0)
    begin = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"RGB" + version + bytes(range(1, size - 3)))
    before = everything_in(tmp_path)
    with pytest.raises(LaterFormatError, match=f"byte {begin}") as caught:
        StreamLog.open(disk, "orders")
    if version != b"2":  # it may be a flipped bit: how to cut it off on purpose
        assert f"truncate -s {begin} {path}" in str(caught.value)
    assert everything_in(tmp_path) == before
    with path.open("r+b") as file:
        file.truncate(begin)
    log, found = StreamLog.open(disk, "orders")
    assert (found.cut_bytes, found.damage, log.end) == (0, None, 3)
    log.close()


@pytest.mark.parametrize("behind", [0, 1])
def test_batches_of_a_later_version_are_not_damage_though_marks_follow(
    tmp_path: Path, behind: int
) -> None:
    disk = NodeDisk(tmp_path)
    written(disk)
    path = tmp_path / "orders" / log_name(0)
    data = path.read_bytes() + b"RGB2" + bytes(range(1, 200))
    path.write_bytes(data + mark(4 + behind, len(data)))
    before = everything_in(tmp_path)
    with pytest.raises(LaterFormatError):
        StreamLog.open(disk, "orders")
    assert everything_in(tmp_path) == before


def test_a_torn_end_that_has_not_the_four_bytes_of_a_version_is_cut_off(tmp_path: Path) -> None:
    for torn in (b"RGB", b"RGB0" + bytes(80), b"RGB1" + bytes(80), b"\0GB2" + bytes(80)):
        directory = tmp_path / torn[:4].hex()
        disk = NodeDisk(directory)
        written(disk)
        with (directory / "orders" / log_name(0)).open("ab") as file:
            file.write(torn)
        log, found = StreamLog.open(disk, "orders")
        assert (found.cut_bytes, found.damage, log.end) == (len(torn), None, 3)
        log.close()


def test_a_torn_batch_is_still_cut_off(tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path)
    written(disk)
    torn = bytearray(later_batch(unknown_flag, 3))
    torn[50] ^= 1  # the checksum of the header does not fit: nobody knows what it was
    with (tmp_path / "orders" / log_name(0)).open("ab") as file:
        file.write(torn)
    log, found = StreamLog.open(disk, "orders")
    assert (found.cut_bytes, found.damage, log.end) == (len(torn), None, 3)
    log.close()


def test_a_later_batch_in_an_older_segment_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """Older segments are believed by their index: the batch is found by a reader, and is no damage."""
    disk, small = NodeDisk(tmp_path), LogConfig(segment_bytes=150, index_bytes=100)
    written(disk, small, 6)
    path = sorted((tmp_path / "orders").glob("*.log"))[1]
    data = bytearray(path.read_bytes())
    at, base = 0, int(path.name[:20])
    while data[at : at + 4] != b"RGB1":
        at += 1
    unknown_flag(memoryview(data)[at : at + 64])  # type: ignore[arg-type]
    struct.pack_into("<I", data, at + 8, crc32(data[at + 12 : at + 64]))
    path.write_bytes(data)
    log, found = StreamLog.open(disk, "orders", small)
    before = everything_in(tmp_path)
    assert found.damage is None
    assert [head(batch).base for batch in log.read(0)] == list(range(base))
    with pytest.raises(LaterFormatError):
        log.read(base)
    assert log.damage is None
    assert log.repair() == 0
    assert Records(log.read(5)[0]).base == 5
    assert everything_in(tmp_path) == before
    log.close()
    (tmp_path / "orders" / index_name(base)).unlink()
    with pytest.raises(LaterFormatError):
        StreamLog.open(disk, "orders", small)


def test_a_log_can_be_cut_right_before_a_later_batch(tmp_path: Path) -> None:
    disk = LogDisk(seed=1)
    log, _ = StreamLog.open(disk, "orders")
    for n in range(2):
        batch = build([b"message %d" % n])
        log.stamp([batch], 1, n)
        log.append([batch])
        log.sync()
    assert log.cut(1) == 1
    log.close()


# ---------------------------------------------------------------- notes: groups, Raft


def group_log(disk: NodeDisk) -> GroupLog[groups.Kept]:
    return GroupLog.open(disk, "orders", groups.fold)[0]


def raft_log(disk: NodeDisk) -> Wal:
    return Wal.open(disk, "raft")[0]


def note_of_version_2(magic: bytes) -> bytes:
    """As the rules of notes.py say: the checksum begins with the version."""
    note = pack(magic, 1, b"new", "billing")
    version = magic[:3] + b"2"
    return version + struct.pack("<I", crc32(note[8:], crc32(version))) + note[8:]


later_notes = {
    "a version": note_of_version_2,
    "a kind": lambda magic: pack(magic, 77, b"new", "billing"),
}


@pytest.mark.parametrize("note", later_notes.values(), ids=later_notes.keys())
@pytest.mark.parametrize("marked", [False, True])
def test_a_note_of_a_later_version_ends_no_group(
    tmp_path: Path, note: Callable[[bytes], bytes], marked: bool
) -> None:
    disk = NodeDisk(tmp_path)
    log = group_log(disk)
    log.append([("billing", groups.pack([Settled(0, 9)]))])
    log.sync()
    log.close()
    path = tmp_path / "orders" / "groups"
    data = path.read_bytes() + note(b"RGG1")
    path.write_bytes(data + (mark(2, len(data)) if marked else b""))
    before = everything_in(tmp_path)
    with pytest.raises(LaterFormatError, match="group log of stream 'orders'"):
        group_log(disk)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("size", [4, 14, 100])
@pytest.mark.parametrize("version", [b"2", b"3"])
def test_a_note_of_a_later_version_with_rules_we_do_not_know_is_not_cut_off(
    tmp_path: Path, version: bytes, size: int
) -> None:
    disk = NodeDisk(tmp_path)
    log = group_log(disk)
    log.append([("billing", groups.pack([Settled(0, 9)]))])
    log.sync()
    log.close()
    path = tmp_path / "orders" / "groups"
    path.write_bytes(path.read_bytes() + b"RGG" + version + bytes(range(1, size - 3)))
    before = everything_in(tmp_path)
    with pytest.raises(LaterFormatError, match="group log of stream 'orders'"):
        group_log(disk)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(
    "change", [b'[["x",3,9]]', b'[["d",3,9,"for a reason"]]', b'[["o",0,9,[1,"",0,0,7,7,7,7,7,7]]]']
)
def test_a_change_of_a_group_that_a_later_version_wrote(tmp_path: Path, change: bytes) -> None:
    disk = NodeDisk(tmp_path)
    log = group_log(disk)
    log.append([("billing", change)])
    log.sync()
    log.close()
    before = everything_in(tmp_path)
    with pytest.raises(LaterFormatError, match="group log of stream 'orders'"):
        group_log(disk)
    assert everything_in(tmp_path) == before


def test_all_that_is_dumped_of_a_group_is_loaded_again(tmp_path: Path) -> None:
    """Also fields that a group rarely has: none of them may look like one of a later version."""
    saved = Saved()
    names = [field.name for field in dataclasses.fields(Saved)]
    for name, value in {"floor": 3, "epoch": 2, "highest": 8, "exclusive": True}.items():
        assert name in names
        setattr(saved, name, value)
    saved.pause = (1_000, 500)
    for change in (Settled(5, 9), Unsettled(10, 12, Standing(2, "late"))):
        saved.apply(change)
    assert groups.load(groups.dump(saved)) == saved


def test_a_dumped_group_with_more_than_this_version_knows() -> None:
    dumped = groups.dump(Saved())
    told, _, rest = dumped.partition(b"\n")
    more = json.dumps(json.loads(told) | {"from_later": 1}).encode()
    with pytest.raises(LaterVersionError, match="from_later"):
        groups.load(more + b"\n" + rest)


@pytest.mark.parametrize("note", later_notes.values(), ids=later_notes.keys())
def test_a_raft_log_of_a_later_version_is_not_damaged(
    tmp_path: Path, note: Callable[[bytes], bytes]
) -> None:
    """To an operator "damaged" means: empty the directory. That would throw away a vote."""
    disk = NodeDisk(tmp_path)
    wal = raft_log(disk)
    wal.write(None, Snapshot(0, 0, Members(("a",))), ())
    wal.write(Hard(1, "a"), None, [Entry(1, 1)])
    wal.sync()
    wal.close()
    with (tmp_path / "raft" / "wal").open("ab") as file:
        file.write(note(b"RGW1"))
    before = everything_in(tmp_path)
    with pytest.raises(LaterFormatError) as caught:
        raft_log(disk)
    assert not isinstance(caught.value, DamagedWalError)
    assert everything_in(tmp_path) == before


# ---------------------------------------------------------------- format files


def test_all_directories_of_a_node_have_a_format_file(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"hello")

    run(main())
    found = {
        str(path.relative_to(tmp_path)): json.loads(path.read_bytes())
        for path in tmp_path.rglob(FORMAT_FILE)
    }
    assert found == {
        "format": {"format": "railgun node", "version": 1},
        "streams/orders/format": {"format": "railgun stream", "version": 1},
    }


def test_a_directory_from_before_format_files_gets_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"hello")
            await running.stop()
            for path in list(tmp_path.rglob(FORMAT_FILE)):
                path.unlink()
            await running.start()
            assert (await (await running.client()).describe("orders"))["end"] == 1
            assert len(list(tmp_path.rglob(FORMAT_FILE))) == 2

    run(main())


@pytest.mark.parametrize("where", ["", "streams/orders"])
def test_a_node_leaves_a_later_directory_alone(tmp_path: Path, where: str) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"hello")
            await running.stop()
            path = tmp_path / where / FORMAT_FILE
            told = json.loads(path.read_bytes())
            path.write_text(json.dumps(told | {"version": 2}))
            before = everything_in(tmp_path)
            with pytest.raises(LaterVersionError, match=str(path.parent)):
                await running.start()
            running.server = None
            with pytest.raises(LaterVersionError, match=str(path.parent)):
                retime(tmp_path, latest=0)
            assert everything_in(tmp_path) == before
            path.write_text(json.dumps(told))
            await running.start()
            assert (await (await running.client()).describe("orders"))["end"] == 1

    run(main())


def test_a_node_with_a_batch_of_a_later_version_does_not_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"hello")
            await running.stop()
            with (tmp_path / "streams/orders/log" / log_name(0)).open("ab") as file:
                file.write(later_batch(unknown_flag, 1))
            before = everything_in(tmp_path)
            with pytest.raises(LaterFormatError, match="orders"):
                await running.start()
            running.server = None
            assert everything_in(tmp_path) == before

    run(main())


def test_the_identity_of_a_node_of_a_later_version_is_not_lost(tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path)
    who = identity.load(disk)
    assert json.loads((tmp_path / "cluster" / FORMAT_FILE).read_bytes())["version"] == 1
    path = tmp_path / identity.FILE
    told = json.loads(path.read_bytes())
    path.write_text(json.dumps(told | {"level": 3}))
    with pytest.raises(LaterFormatError, match="level"):
        identity.load(disk)
    path.write_text(json.dumps(told))
    (tmp_path / "cluster" / FORMAT_FILE).write_bytes(Format("railgun cluster", 2).dump())
    before = everything_in(tmp_path)
    with pytest.raises(LaterVersionError):
        identity.load(disk)
    assert everything_in(tmp_path) == before
    (tmp_path / "cluster" / FORMAT_FILE).unlink()
    assert identity.load(disk) == who


def test_a_format_file_on_a_disk_that_loses_power_is_whole_or_not_there() -> None:
    for seed in range(20):
        disk = LogDisk(seed=seed)
        identity.load(disk)
        disk.lose_power()
        assert identity.load(disk).id


def committed_snapshot(url: str) -> Manifest:
    store = SnapshotStore(url, "demo")
    store.acquire()
    store.next_run()
    store.begun(1, full=True, why="on demand")
    part = store.write_part(1, 1, "count", "count by name", 0, b"rows", rows=1)
    made = Manifest(1, "demo", 1, 1, 1, True, False, 0.0, 1.0, (part,), (), ())
    store.commit(made)
    store.release()
    return made


def test_a_snapshot_directory_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    committed_snapshot(str(tmp_path))
    path = tmp_path / "demo" / FORMAT_FILE
    assert json.loads(path.read_bytes()) == {"format": "railgun snapshots", "version": 1}
    path.write_bytes(Format("railgun snapshots", 2).dump())
    before = everything_in(tmp_path)
    for use in (SnapshotStore.acquire, SnapshotStore.latest, SnapshotStore.manifests):
        with pytest.raises(FormatError, match="version 2"):
            use(SnapshotStore(str(tmp_path), "demo"))
    assert everything_in(tmp_path) == before
    path.unlink()
    store = SnapshotStore(str(tmp_path), "demo")
    store.acquire()
    assert path.exists()
    store.release()


def test_a_manifest_of_a_later_version_is_not_skipped_as_damaged(tmp_path: Path) -> None:
    made = committed_snapshot(str(tmp_path))
    later = asdict(made) | {"format": 2, "snapshot": 2}
    (tmp_path / "demo/manifests/000000000002.json").write_bytes(seal("manifest", later))
    store = SnapshotStore(str(tmp_path), "demo")
    before = everything_in(tmp_path)
    with pytest.raises(FormatError):
        store.manifests([])
    with pytest.raises(FormatError):
        store.latest(allow_older=True)
    assert everything_in(tmp_path) == before


def test_the_directory_of_a_sink_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.open()
    ledger.close()
    path = tmp_path / FORMAT_FILE
    assert json.loads(path.read_bytes()) == {"format": "railgun sink", "version": 2}
    path.write_bytes(Format("railgun sink", 3).dump())
    before = everything_in(tmp_path)
    with pytest.raises(SinkError, match="version 3") as caught:
        Ledger(tmp_path).open()
    assert caught.value.code == "LATER_VERSION"
    assert everything_in(tmp_path) == before


def test_the_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / FORMAT_FILE).write_bytes(Format("railgun sink", 1).dump())

    async def main() -> None:
        with pytest.raises(OtherFormatError, match="railgun sink"):
            async with node(tmp_path):
                pass

    run(main())
