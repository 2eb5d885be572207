"""A master whose process hangs: its connections stay, and nothing comes over them any more."""

from __future__ import annotations

import asyncio
import importlib
import signal
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("node", ["another node", "the master"])
def test_who_is_connected_goes_on_without_a_master_that_hangs(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    clusters: Any = importlib.import_module("bench._clusters")
    clusterer: Any = importlib.import_module("bench._clusterer")

    async def use(cluster: Any) -> None:
        await clusterer.begin(cluster)
        _, master, other = await cluster.roles()
        async with await cluster.client(other if node == "another node" else master) as client:
            assert await client.publish("bench", b"before", id="1") == 0
            master.signal(signal.SIGSTOP)
            # A session that is passed on is silent for longer than this before it is given up.
            assert await client.publish("bench", b"after", id="2", timeout=15.0) == 1
            async with await client.subscribe("bench", group="all") as subscription:
                found = await subscription.batch(2, 15.0)
            assert [message.payload for message in found][:1] == [b"before"]

    with clusters.ours(tmp_path / "cluster") as cluster:
        asyncio.run(use(cluster))
