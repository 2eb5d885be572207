"""Nodes whose disks refuse writes: how they are made so, and what they say of it."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.broker.clustered import DEADLINE, Clustered
from verification.faults.shim import Control, ShimDisk

from railgun.broker.log.disk import NodeDisk
from railgun.client.client import Client


async def health(http_port: int | None) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer of `/health`."""
    url = f"http://127.0.0.1:{http_port}/health"

    def ask() -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return await asyncio.to_thread(ask)


async def becomes(http_port: int | None, status: int) -> dict[str, Any]:
    """Wait until `/health` has this status, and return its answer."""
    end = time.monotonic() + DEADLINE
    while True:
        code, told = await health(http_port)
        if code == status:
            return told
        assert time.monotonic() < end, told
        await asyncio.sleep(0.02)


def shimmed(cluster: Clustered, path: Path) -> dict[str, Control]:
    """Give all nodes disks that can be told to refuse; by name."""
    controls = {}
    for n in range(1, 4):
        control = controls[f"n{n}"] = Control(None)
        cluster.disks[f"n{n}"] = ShimDisk(NodeDisk(path / f"n{n}"), control)
    return controls


async def codes(client: Client) -> set[str]:
    """Return the codes of all alarms."""
    told = await client.admin("cluster", DEADLINE)
    return {one["code"] for one in told["alarms"]}


async def has_alarm(client: Client, code: str) -> None:
    """Wait for an alarm."""
    end = time.monotonic() + DEADLINE
    while code not in (found := await codes(client)):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)


async def has_no_alarm(client: Client) -> None:
    """Wait until there is no alarm."""
    end = time.monotonic() + DEADLINE
    while found := await codes(client):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)


async def alarms_of(client: Client, code: str) -> list[dict[str, Any]]:
    """Return the alarms with this code, once there is one."""
    await has_alarm(client, code)
    told = await client.admin("cluster", DEADLINE)
    return [one for one in told["alarms"] if one["code"] == code]


async def is_told(client: Client, name: str) -> dict[str, Any]:
    """Wait until the status says that a node cannot write, and return that status."""
    end = time.monotonic() + DEADLINE
    while True:
        told: dict[str, Any] = await client.admin("cluster", DEADLINE)
        if any(one["code"] == "NODE_TROUBLE" and one["about"] == name for one in told["alarms"]):
            return told
        assert time.monotonic() < end, told["alarms"]
        await asyncio.sleep(0.05)
