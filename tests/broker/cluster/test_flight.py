"""What is on its way to another node: it stays within bounds, and everybody's turn comes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.broker.clustered import clustered, until
from tests.broker.running import run

from railgun.broker.cluster import feeding
from railgun.broker.cluster.flight import Flight


def test_turns_come_in_order_and_what_is_taken_stays_within_bounds() -> None:
    async def main() -> None:
        flight, order = Flight(10), []

        async def one(number: int, size: int) -> None:
            await flight.take(size)
            order.append(number)
            assert flight.size <= 10 or flight.size == size
            await asyncio.sleep(0)
            flight.give(size)

        sizes = [4, 4, 4, 9, 1, 30, 2, 10, 3]  # 30 goes alone
        await asyncio.gather(*(one(number, size) for number, size in enumerate(sizes)))
        assert order == list(range(len(sizes)))
        assert flight.size == 0

    run(main())


def test_who_does_not_want_it_any_more_keeps_nobody_waiting() -> None:
    async def main() -> None:
        flight = Flight(10)
        await flight.take(10)
        waiting = [asyncio.create_task(flight.take(10)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # while it waits
        await asyncio.sleep(0)
        flight.give(10)
        waiting[1].cancel()  # when it is its turn, and it has not heard of it
        await asyncio.wait(waiting, timeout=5.0)
        assert [task.cancelled() for task in waiting] == [True, True, False]
        assert flight.size == 10
        flight.add(5)
        flight.give(15)
        assert flight.size == 0

    run(main())


def test_many_streams_that_lag_behind_do_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, piece = 512 << 10, 128 << 10
    monkeypatch.setattr(Flight.__init__, "__defaults__", (most,))
    monkeypatch.setattr(feeding, "READ_BYTES", piece)
    names = [f"s{n}" for n in range(12)]
    seen: list[int] = []

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            first = await cluster.client()
            for name in names:
                await first.ensure(name)
            master = await cluster.ready("s0")
            away = next(name for name in cluster.servers if name != master)
            for name in names:
                await cluster.in_step(name)
            await cluster.stop(away)
            client = await cluster.client(master)
            for name in names:
                for number in range(10):
                    await client.publish(name, bytes(100_000), id=str(number))
            take = Flight.take

            async def looked_at(flight: Flight, size: int) -> None:
                await take(flight, size)
                seen.append(flight.size)

            monkeypatch.setattr(Flight, "take", looked_at)
            await cluster.start(away)
            for name in names:
                await cluster.in_step(name)
            flights = cluster.member(master).regions.flights
            await until(lambda: all(one.size == 0 for one in flights.values()))

    run(main())
    assert len(seen) > 12 * 10 * 100_000 // piece // 2
    assert max(seen) <= most + piece
