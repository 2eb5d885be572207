"""A disk that forgets what was not synced, a clock that jumps, and files that rot."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from random import Random

import pytest
from tests.broker.running import node, run, stored
from verification.faults import damage
from verification.faults.shim import LOOK_PAUSE_S, Control, JumpingClock, Orders, ShimDisk

from railgun.broker.clock import time_of_day
from railgun.broker.log.disk import NodeDisk
from railgun.broker.settings import SECOND


def content(root: Path, path: str) -> bytes:
    """What is there if the process is killed now."""
    return (root / path).read_bytes()


def told(control: Control, orders: Orders, file: Path) -> None:
    """It hears of its orders."""
    orders.write(file)
    end = time.monotonic() + 5
    while control.orders != orders:
        assert time.monotonic() < end
        time.sleep(LOOK_PAUSE_S / 5)


def test_what_is_not_synced_is_seen_and_is_not_there(tmp_path: Path) -> None:
    disk = ShimDisk(NodeDisk(tmp_path))
    disk.make_directory("d")
    file = disk.create("d/a")
    file.write([b"one", b"two"])
    assert (file.size(), file.read(2, 3), content(tmp_path, "d/a")) == (6, b"etw", b"")
    file.sync()
    assert content(tmp_path, "d/a") == b"onetwo"
    file.write([b"three"])
    assert [file.read(at, 4) for at in (0, 4, 5, 6, 9, 11, 20)] == [
        *(b"onet", b"woth", b"othr", b"thre", b"ee", b"", b"")
    ]
    again = disk.open("d/a")  # the same file, as another part of the program sees it
    assert again.read(0, 100) == b"onetwothree"
    file.close()
    again.truncate(8)
    assert (again.read(0, 100), again.size()) == (b"onetwoth", 8)
    again.truncate(2)
    assert (again.read(0, 100), content(tmp_path, "d/a")) == (b"on", b"on")
    again.write([b"x"])
    disk.rename("d/a", "d/b")
    assert disk.open("d/b").read(0, 100) == b"onx"
    assert content(tmp_path, "d/b") == b"on"
    disk.remove("d/b")
    disk.create("d/b").write([b"new"])
    assert disk.open("d/b").read(0, 9) == b"new"
    disk.clear("d")
    assert disk.list("d") == []


def test_a_torn_write_leaves_a_half(tmp_path: Path) -> None:
    Orders(torn=True).write(tmp_path / "orders")
    file = ShimDisk(NodeDisk(tmp_path / "data"), Control(tmp_path / "orders"))
    file.make_directory("d")
    opened = file.create("d/a")
    opened.write([b"abcd", b"efgh"])
    assert content(tmp_path / "data", "d/a") == b"abcd"
    assert (opened.read(2, 4), opened.size()) == (b"cdef", 8)
    opened.sync()
    assert content(tmp_path / "data", "d/a") == b"abcdefgh"


def test_a_full_disk_and_a_sync_that_fails(tmp_path: Path) -> None:
    control = Control(tmp_path / "orders")
    disk = ShimDisk(NodeDisk(tmp_path / "data"), control)
    disk.make_directory("d")
    file = disk.create("d/a")
    told(control, Orders(full=True), tmp_path / "orders")
    for attempt in (lambda: file.write([b"x"]), lambda: disk.create("d/b")):
        with pytest.raises(OSError, match="No space left"):
            attempt()
    told(control, Orders(), tmp_path / "orders")
    file.write([b"x"])
    told(control, Orders(fail_sync=True), tmp_path / "orders")
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    told(control, Orders(slow_sync=0.01), tmp_path / "orders")
    file.sync()  # and nothing is said of it
    assert (file.read(0, 9), content(tmp_path / "data", "d/a")) == (b"x", b"")


def test_orders_can_be_read_whatever_is_there(tmp_path: Path) -> None:
    assert Orders.read(tmp_path / "none") == Orders()
    made = Orders(full=True, ahead=-3.5).but(full=False)
    made.write(tmp_path / "orders")
    assert Orders.read(tmp_path / "orders") == made
    control = Control(tmp_path / "orders")
    clock = JumpingClock(control)
    assert clock() < time_of_day() - 3 * SECOND
    told(control, Orders(ahead=100.0), tmp_path / "orders")
    assert clock() > time_of_day() + 99 * SECOND
    os.unlink(tmp_path / "orders")
    end = time.monotonic() + 5
    while control.orders != Orders():
        assert time.monotonic() < end
        time.sleep(LOOK_PAUSE_S / 5)


def test_a_node_works_on_it_and_damage_is_found(tmp_path: Path) -> None:
    async def main() -> None:
        data, chance = tmp_path / "n", Random(3)
        disk = ShimDisk(NodeDisk(data))
        async with node(data, disk=disk) as running:
            client = await running.client()
            for name in ("orders", "others"):
                await client.ensure(name)
                for number in range(30):
                    await client.publish(name, f"{number:050}")
            async with await client.subscribe("orders", group="g") as sub:
                for _ in range(20):
                    (await sub.next(5)).ack()
                    await sub.flush()
            await running.stop()
            assert [one.name for one in damage.stream_directories(data)] == ["orders", "others"]
            assert "are cut off" in damage.cut_tail(data, chance)
            assert "groups is flipped" in damage.flip_group_bit(data, chance)
            await running.start()
            client = await running.client()
            ends = [(await client.describe(name))["end"] for name in ("orders", "others")]
            assert sorted(ends)[0] < 30
            assert sorted(ends)[1] == 30
            await running.stop()
            assert "is flipped" in damage.flip_bit(data, chance)
            await running.start()
            client = await running.client()
            assert any("damage" in line for line in running.told), running.told
            await running.stop()
            assert "is removed" in damage.remove_stream(data, chance)
            assert len(damage.stream_directories(data)) == 1
            await running.start()
            client = await running.client()
            left = damage.stream_directories(data)[0].name
            assert len(await client.streams()) == 1
            await running.stop()
            damage.remove_stream(data, chance)
            await running.start()
            client = await running.client()
            assert await client.streams() == [], left
            await client.ensure("orders")
            assert await stored(client, "orders") == []
        assert damage.flip_bit(tmp_path / "none", chance) == ""
        assert damage.cut_tail(tmp_path / "none", chance) == ""

    run(main())


def test_files_of_streams_refuse_to_be_written_and_others_do_not(tmp_path: Path) -> None:
    orders = tmp_path / "orders.json"
    control = Control(orders)
    disk = ShimDisk(NodeDisk(tmp_path), control)
    for directory in ("streams/a", "cluster"):
        disk.make_directory(directory)
    log, other = disk.create("streams/a/log"), disk.create("cluster/wal")
    told(control, Orders(refuse=errno.EFBIG), orders)
    with pytest.raises(OSError, match="too large") as caught:
        log.write([b"x"])
    assert caught.value.errno == errno.EFBIG
    other.write([b"x"])
    assert disk.free() > 0
    told(control, Orders(), orders)
    log.write([b"x"])
    log.sync()
    assert content(tmp_path, "streams/a/log") == b"x"
