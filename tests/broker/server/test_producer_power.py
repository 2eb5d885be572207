"""Producers on a disk that forgets what was not synced: each commit is there once, wholly, after every power cut."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, run
from tests.broker.server.test_power import Fragile, fragile, processes
from tests.broker.server.test_producers import STREAM, everything

from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.client.producer import Producer

__all__ = ["processes"]
ROUNDS = 12


async def live_through(running: Fragile, client: Client, chance: random.Random) -> list[bytes]:
    """Stage and commit while the power is cut again and again; what has to be in the stream then."""
    wanted: list[bytes] = []
    for round in range(1, ROUNDS + 1):
        keep = wanted and chance.random() < 0.5
        producer = await client.producer(STREAM, "flow", round, keep=[] if keep else None)
        running.cut_at(chance.randint(0, 25))
        payloads = [b"%d.%d" % (round, n) for n in range(chance.randint(1, 12))]
        await asyncio.wait_for(stage_and_commit(producer, payloads, chance), 3 * DEADLINE)
        running.disk.hook = lambda name, path: None
        wanted += payloads
        if chance.random() < 0.2:
            await purge(client)
            wanted = []
        assert await everything(client) == wanted
    return wanted


async def purge(client: Client) -> None:
    """Empty the stream, however often that has to be asked for: the node may be about to come back."""
    while True:
        try:
            await client.admin("purge", name=STREAM)
            return
        except StreamsError as error:
            if not error.may_pass:
                raise


async def stage_and_commit(
    producer: Producer, payloads: list[bytes], chance: random.Random
) -> None:
    stage = await producer.open()
    for payload in payloads:
        await stage.put([payload])
    for _ in range(chance.randint(1, 3)):
        await producer.commit([stage], timeout=2 * DEADLINE)


@pytest.mark.simulation
@pytest.mark.parametrize("seed", range(12))
def test_a_commit_is_there_once_after_every_power_cut(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)
        async with fragile(tmp_path, seed) as running:

            async def restart() -> None:
                while True:
                    await running.down.wait()
                    await running.again()

            restarting = asyncio.create_task(restart())
            try:
                client = await running.client(timeout=2 * DEADLINE)
                await client.ensure(STREAM)
                await live_through(running, client, chance)
                assert running.cuts >= ROUNDS // 3
            finally:
                restarting.cancel()

    run(main(), deadline=12 * DEADLINE)
