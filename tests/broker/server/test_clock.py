"""A node whose clock is wrong, jumps back and forth, or is a day further than it was a moment ago."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.broker.clustered import clustered, retried
from tests.broker.clustered import until as until_slowly
from tests.broker.running import Running, node, nothing, run, take, until
from verification.faults.shim import Control, Orders, ShimDisk

import railgun.broker.streams.node as node_module
from railgun.broker.clock import time_of_day
from railgun.broker.errors import NoStreamError
from railgun.broker.log.disk import NodeDisk
from railgun.broker.log.segment import Walk
from railgun.broker.protocol.stored_time import PacedClock
from railgun.broker.server.metrics import prometheus
from railgun.broker.settings import SECOND
from railgun.broker.streams.retime import NodeRunsError, WouldExpireError, retime
from railgun.cli.errors import DONE, FAILED
from railgun.cli.main import main as command
from railgun.client.client import Client
from railgun.client.errors import DuplicateIdError

HOUR = 3600.0
DAY = 24 * HOUR


@pytest.fixture(autouse=True)
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that looks at its clock more often than others."""
    monkeypatch.setattr(node_module, "CHECK_CLOCK_S", 0.01)


async def looked(running: Running) -> None:
    """The node has looked at its clock, and its groups after that."""
    assert running.server is not None
    seen, node = [running.server.node._beating], running.server.node

    def beat() -> bool:
        if node._beating is not seen[-1]:
            seen.append(node._beating)
        return len(seen) > 3

    await until(beat)


@pytest.mark.parametrize("restart", [False, True])
def test_ps7_a_delay_of_a_day_ends_after_a_day(tmp_path: Path, restart: bool) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1"])
            sub = await client.subscribe("orders", group="billing")
            first, second = await take(sub, 2)
            first.nack(delay=DAY)
            second.nack(delay=HOUR)
            await sub.flush()
            for hours, expected in ((0.9, None), (1.1, 1), (23.9, None), (24.1, 0)):
                if restart:
                    await running.again()
                running.ahead = hours * HOUR
                if expected is None:
                    await nothing(sub)
                else:
                    (message,) = await take(sub, 1)
                    assert (message.offset, message.delivery) == (expected, 2)
                    message.ack()
                    await sub.flush()
            explained = await client.group("orders", "billing")
            assert explained["code"] == "AT_END"

    run(main())


def test_ps7_a_clock_that_went_back_makes_nothing_wait_longer_than_it_was_to(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            running.ahead = 10 * HOUR
            await looked(running)
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"0")
            sub = await client.subscribe("orders", group="billing")
            (message,) = await take(sub, 1)
            message.nack(delay=HOUR)
            await sub.flush()
            running.ahead = 0.0  # by this clock, the delay ends in eleven hours
            await looked(running)
            running.ahead = 0.9 * HOUR
            await nothing(sub)
            running.ahead = 1.1 * HOUR
            (message,) = await take(sub, 1)
            assert message.delivery == 2

    run(main())


def test_ps8_ack_wait_survives_a_clock_that_jumps(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"0")
            sub = await client.subscribe("orders", group="billing", ack_wait=60.0)
            (message,) = await take(sub, 1)
            running.ahead = -5 * HOUR
            await looked(running)
            message.in_progress()
            second = await other.subscribe("orders", group="billing", ack_wait=60.0)
            running.ahead = -5 * HOUR + 30.0
            await nothing(second)
            running.ahead = -5 * HOUR + 70.0
            message = await second.next(5.0)
            assert message.delivery == 2
            message.ack()
            await second.flush()
            assert (await client.group("orders", "billing"))["lag"] == 0

    run(main())


def test_ps9_ids_are_remembered_though_the_clock_jumps(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", id_box=2 * HOUR)
            assert await client.publish("orders", b"0", id="a") == 0
            for hours in (-100.0, 1.0, -1.0, 1.9):
                running.ahead = hours * HOUR
                with pytest.raises(DuplicateIdError):
                    await client.publish("orders", b"0", id="a")
                await running.again()
                client = await running.client()
            for n, hours in enumerate((2.1, 0.0, 24.0, 0.0)):  # wrong at every other start
                running.ahead = hours * HOUR
                await running.again()
                client = await running.client()
                await client.publish("orders", b"1", id=f"b{n}")
                with pytest.raises(DuplicateIdError):
                    await client.publish("orders", b"0", id="a")

    run(main())


def test_ps9_an_id_is_forgotten_when_its_box_is_over_by_the_steady_clock(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", id_box=0.4)
            assert await client.publish("orders", b"0", id="a") == 0
            running.ahead = -DAY  # which has no say in it
            async with asyncio.timeout(20.0):
                while True:
                    with contextlib.suppress(DuplicateIdError):
                        assert await client.publish("orders", b"0", id="a") == 1
                        return
                    await asyncio.sleep(0.05)

    run(main())


def test_ps3_stored_time_never_steps_back_and_never_leaps_while_a_node_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            began = client.loop.time()
            for hours in (0.0, 3.0, -7.0, 1.0, 24 * 365.0, -1000.0):
                running.ahead = hours * HOUR
                await client.publish("orders", b"x")
            passed = client.loop.time() - began
            async with await client.subscribe("orders") as sub:
                times = [message.time for message in await take(sub, 6)]
            assert times == sorted(times)
            assert times[-1] - times[0] <= (1.2 * passed + 0.1) * SECOND

    run(main())


def test_a_batch_stored_a_year_ahead_does_not_pin_stored_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            running.ahead = 365 * DAY
            await running.again()  # a node takes the time of day when it starts
            client = await running.client()
            await client.ensure("orders", max_age=4 * 120.0)
            await client.publish("orders", b"0")
            running.ahead = 0.0
            await running.again()
            assert any("ahead of this machine's clock" in line for line in running.told)
            client = await running.client()
            await client.publish("orders", b"1")
            stream = running.server.node.get_persistent("orders")  # type: ignore[union-attr]
            first = stream.stored_now()
            await until(lambda: stream.stored_now() > first)
            async with await client.subscribe("orders") as sub:
                times = [message.time for message in await take(sub, 2)]
            assert times == sorted(times)
            running.ahead = 2 * 365 * DAY  # so much later
            await stream.retain()
            assert (await client.describe("orders"))["first"] == 0, (
                "the time of day alone ages nothing"
            )

    run(main())


def test_ps11_dead_letters_by_age(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_age=HOUR)
            await client.publish_many("orders", [b"0", b"1"])
            sub = await client.subscribe("orders", group="billing")
            first, second = await take(sub, 2)
            second.ack()
            first.nack(delay=DAY, reason="not today")
            await sub.flush()
            running.ahead = 2 * HOUR
            async with asyncio.timeout(5.0):
                while "orders.dlq" not in [one["name"] for one in await client.streams()]:
                    await asyncio.sleep(0.01)
            letters = await client.subscribe("orders.dlq", group="undertaker")
            (letter,) = await take(letters, 1)
            assert letter.payload == b"0"
            assert letter.headers["rule"] == "dead_age"

    run(main())


def test_ps18_retention_by_age_with_a_clock_that_jumps(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", max_age=HOUR)
            await client.publish("orders", b"0")
            running.ahead = -DAY
            stream = running.server.node.get_persistent("orders")  # type: ignore[union-attr]
            await stream.retain()
            assert (await client.describe("orders"))["first"] == 0
            await client.publish("orders", b"1")
            await client.purge("orders", 1)
            running.ahead = DAY
            await stream.retain()
            assert await client.publish("orders", b"2") == 2

    run(main())


# ---------------------------------------------------------------- mending, and telling


def test_times_that_were_stored_ahead_are_mended_by_a_repair(tmp_path: Path) -> None:
    async def stored_ahead() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.ensure("untouched")
            await client.publish_many("orders", [b"0", b"1"], ids=["a", "b"])
            await client.publish("untouched", b"x")
            running.ahead = 365 * DAY
            await running.again()
            client = await running.client()
            await client.publish("orders", b"2", id="c")
            stream = running.server.node.get_persistent("orders")  # type: ignore[union-attr]
            await stream.perform(stream.log, stream.log.roll)
            await client.publish("orders", b"3")
            with pytest.raises(NodeRunsError):
                retime(tmp_path, time_of_day())

    async def mended(latest: int) -> None:
        async with node(tmp_path) as running:
            assert running.told == []
            client = await running.client()
            await client.publish("orders", b"4")
            async with await client.subscribe("orders") as sub:
                found = await take(sub, 5)
            assert [message.payload for message in found] == [b"0", b"1", b"2", b"3", b"4"]
            times = [message.time for message in found]
            assert times == sorted(times)
            assert times[1] < times[2] == times[3] == latest < times[4] <= time_of_day()
            with pytest.raises(DuplicateIdError):
                await client.publish("orders", b"0", id="c")

    run(stored_ahead())
    latest = time_of_day()
    assert retime(tmp_path, latest) == {"orders": 2, "untouched": 0}
    assert retime(tmp_path, latest, ["orders"]) == {"orders": 0}
    run(mended(latest))
    with pytest.raises(NoStreamError):
        retime(tmp_path, latest, ["nothing"])
    with pytest.raises(NoStreamError):
        retime(tmp_path / "nowhere", latest)


def test_times_are_not_mended_into_what_retention_deletes_unless_asked_to(tmp_path: Path) -> None:
    async def stored() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", max_age=DAY)
            await client.ensure("kept")
            await client.publish_many("orders", [b"0", b"1", b"2"])
            await client.publish("kept", b"0")
            await client.purge("orders", 1)
            running.ahead = HOUR
            await running.again()
            client = await running.client()
            await client.publish_many("orders", [b"3", b"4"])
            await client.publish("kept", b"1")

    def times() -> list[int]:
        paths = sorted(tmp_path.rglob("log/*.log"))
        return [
            head.time for path in paths for _, head, _ in Walk(path.read_bytes(), 0, int(path.stem))
        ]

    async def begins_at(first: int) -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            stream = running.server.node.get_persistent("orders")  # type: ignore[union-attr]
            await stream.retain()
            told = await client.describe("orders")
            assert (told["first"], told["end"]) == (first, 5)

    run(stored())
    before = times()
    long_ago = time_of_day() - int(3 * DAY * SECOND)
    with pytest.raises(WouldExpireError, match="would delete 4 messages of 'orders'") as refused:
        retime(tmp_path, long_ago)
    assert refused.value.messages == {"orders": 4}
    assert times() == before
    typed = [
        "stream",
        "retime",
        "--data",
        str(tmp_path),
        "--latest",
        "1970-01-01T00:00:00+00:00",
        "--yes",
    ]
    assert command(typed) == FAILED
    assert times() == before
    assert retime(tmp_path, long_ago, ["kept"]) == {"kept": 2}, "it is kept for ever"
    assert retime(tmp_path, time_of_day()) == {"orders": 1, "kept": 0}
    run(begins_at(1))
    assert command([*typed, "--may-expire"]) == DONE
    run(begins_at(5))


def test_a_node_whose_clock_is_ahead_is_told_by_an_alarm(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path, 3) as nodes:
            client, master = await nodes.serving("orders")
            member = nodes.member(master)
            follower = next(
                name
                for name in nodes.servers
                if nodes.member(name).consensus and not nodes.member(name).consensus.leads  # type: ignore[union-attr]
            )
            wrong = nodes.member(follower).node
            right = wrong.now
            wrong.now = lambda: right() + 180 * SECOND
            await retried(lambda: _alarmed(client, {"CLOCK_SKEW", "CLOCK_STEPPED"}))
            await retried(lambda: _settled(client))  # it may be stopped, which may be what helps
            wrong.now = right
            await retried(lambda: _alarmed(client, set()))
            assert member.node.pace.stepped < SECOND

    async def _settled(client: Client) -> None:
        assert (await client.admin("cluster"))["settled"]

    async def _alarmed(client: Client, codes: set[str]) -> None:
        found = {one["code"] for one in (await client.admin("cluster"))["alarms"]}
        assert found == codes

    run(main(), deadline=100.0)


def test_a_clock_that_is_wrong_when_a_node_of_a_cluster_starts_is_told_by_all(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with clustered(tmp_path, 3) as nodes:
            client, master = await nodes.serving("orders")
            wrong, *_ = [name for name in sorted(nodes.servers) if name != master]
            await nodes.stop(wrong)
            nodes.clocks[wrong] = lambda: time_of_day() - int(HOUR * SECOND)
            await nodes.start(wrong)
            alarm = await retried(lambda: _told_of_start(client))
            assert alarm["about"] == wrong
            assert "3,600 s behind the last time" in alarm["text"]
            assert await client.publish("orders", b"0") == 0, "it is a warning"
            await nodes.in_step("orders")
            await nodes.stop(wrong)
            del nodes.clocks[wrong]
            await nodes.start(wrong)
            await retried(lambda: _answered_by(client, wrong))
            assert not await _of_start(client)

    async def _of_start(client: Client) -> list[dict[str, Any]]:
        alarms = (await client.admin("cluster"))["alarms"]
        return [one for one in alarms if one["code"] == "CLOCK_AT_START"]

    async def _told_of_start(client: Client) -> dict[str, Any]:
        (alarm,) = await _of_start(client)
        return alarm

    async def _answered_by(client: Client, name: str) -> None:
        found = (await client.admin("cluster"))["nodes"]
        assert [one["answered"] for one in found if one["name"] == name] == [True]

    run(main(), deadline=100.0)


def test_a_new_master_whose_clock_is_ahead_remembers_ids(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path, 3) as nodes:
            client, first = await nodes.serving("orders")
            await client.publish("orders", b"0", id="a")
            ahead = {name: 180 * (n + 1) for n, name in enumerate(sorted(nodes.servers))}
            for name, seconds in ahead.items():
                one = nodes.member(name).node
                one.now = lambda seconds=seconds: time_of_day() + seconds * SECOND  # type: ignore[misc]
                one.pace = PacedClock()  # as if it had been started so
            for turn in range(2):  # every time, the clock of another master
                await nodes.in_step("orders")
                others = [name for name in sorted(nodes.servers) if name != nodes.master()]
                chosen = others[turn % 2]
                await client.admin("transfer", region="global", node=chosen)
                await until_slowly(lambda chosen=chosen: nodes.master() == chosen, "no new master")  # type: ignore[misc]
                await nodes.ready("orders")
                await client.publish("orders", b"x", id=f"b{turn}")
                with pytest.raises(DuplicateIdError):
                    await client.publish("orders", b"0", id="a")
            assert first in nodes.servers

    run(main(), deadline=100.0)


# ---------------------------------------------------------------- a node that is alone


async def _started_again(running: Running, ahead: float) -> None:
    """Start a node again with a clock that is wrong by so many seconds, which it was not before it was stopped."""
    await running.stop()
    running.ahead = ahead
    await running.start()


async def _health(running: Running) -> dict[str, Any]:
    url = f"http://127.0.0.1:{running.http_port}/health"

    def ask() -> dict[str, Any]:
        with urllib.request.urlopen(url, timeout=10) as answer:  # 200: clients are served
            return dict(json.load(answer))

    return await asyncio.to_thread(ask)


async def _alarms_become(running: Running, codes: set[str]) -> list[dict[str, Any]]:
    """Wait until a node that is alone has these alarms, in /health and in its figures; return them."""
    end = time.monotonic() + 20.0
    while True:
        told: list[dict[str, Any]] = (await _health(running))["alarms"]
        if {one["code"] for one in told} == codes:
            break
        assert time.monotonic() < end, told
        await asyncio.sleep(0.02)
    assert running.server is not None
    figures = prometheus(running.server.node, 0)
    assert {code for code in ALARMS if f'railgun_alarms{{code="{code}"}} 1' in figures} == codes
    return told


ALARMS = ("CLOCK_STEPPED", "TIME_AHEAD", "CLOCK_AT_START", "DISK_FULL")


def test_a_lone_node_tells_that_its_clock_has_jumped(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:
            await _alarms_become(running, set())
            running.ahead = HOUR
            (alarm,) = await _alarms_become(running, {"CLOCK_STEPPED"})
            assert "3,600 s ahead" in alarm["text"]
            assert str(tmp_path) in alarm["text"]
            running.ahead = 0.0
            await _alarms_become(running, set())

    run(main())


def test_a_lone_node_tells_of_messages_stored_ahead(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:
            await _started_again(running, DAY)
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"0")
            await _started_again(running, 0.0)
            await _alarms_become(running, {"TIME_AHEAD", "CLOCK_AT_START"})

    run(main())


def test_a_clock_that_is_behind_when_a_node_starts_is_told_until_it_is_set(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:  # without a single message
            await _started_again(running, -HOUR)
            (alarm,) = await _alarms_become(running, {"CLOCK_AT_START"})
            assert "behind" in alarm["text"]
            assert any("behind" in line for line in running.told)
            running.ahead = 0.1
            await _alarms_become(running, {"CLOCK_STEPPED"})  # set right, while the node runs
            await running.again()
            assert running.told == []
            await _alarms_become(running, set())

    run(main())


def test_a_clock_that_is_far_ahead_when_a_node_starts_is_told_in_that_life(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:
            await _started_again(running, 20 * DAY)  # it may have been off for so long
            await _alarms_become(running, set())
            await _started_again(running, 60 * DAY)
            (alarm,) = await _alarms_become(running, {"CLOCK_AT_START"})
            assert "40 days" in alarm["text"]
            await running.again()
            await _alarms_become(running, set())

    run(main())


def test_the_time_is_noted_while_a_node_runs_and_a_bad_note_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "CHECK_FILES_S", 0.05)
    monkeypatch.setattr(node_module, "KEEP_NOTES_S", 0.1)

    async def main() -> None:
        async with node(tmp_path, http_port=0) as running:
            noted = (tmp_path / "clock").read_bytes()
            await until(lambda: (tmp_path / "clock").read_bytes() != noted)  # it may be killed
            await _started_again(running, DAY)
            await running.stop()
            (tmp_path / "clock").write_bytes(b"not a time")
            running.ahead = 0.0
            await running.start()
            await _alarms_become(running, set())

    run(main())


def test_a_lone_node_with_hardly_any_room_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        control = Control(None)
        disk = ShimDisk(NodeDisk(tmp_path), control)
        async with node(tmp_path, http_port=0, disk=disk) as running:
            control._orders = Orders(full=True)
            await _alarms_become(running, {"DISK_FULL"})

    run(main())
