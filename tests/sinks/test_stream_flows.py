"""A flow from stream to stream on real processes: whatever dies, the output is that of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.controller import flows, tallies
from tests.engine.controller.tallies import (
    committed,
    expected,
    kill,
    line_of,
    recovered,
    saved,
    tally,
)

from railgun import Flow, Streams, StreamSink
from railgun.client.sync import SyncClient, connect_sync
from railgun.job import Job, Snapshots
from railgun.testing.node import Served, served

COUNT = 24_000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "node") as made:
        yield made


@pytest.fixture
def client(node: Served) -> Iterator[SyncClient]:
    with connect_sync(data=node.data, timeout=30.0) as made:
        yield made


def tallying(node: Served, **sink: Any) -> Flow:
    """Numbered records of a stream, counted by key, into another stream."""
    flow = Flow("tallying")
    records = flow.source(Streams("records", data=node.data), name="records")
    counted = records.key_by(lambda item: item[0], name="keys").stateful_map(
        tally, initial=int, name="tally"
    )
    counted.sink(StreamSink("counted", data=node.data, **sink), name="out")
    return flow


def fill(client: SyncClient, first: int, end: int) -> None:
    lines = [json.dumps(line_of(n)[:2]) for n in range(first, end)]
    for at in range(0, len(lines), 1000):
        client.publish_many("records", lines[at : at + 1000], id=f"{first + at}")


def counted(client: SyncClient) -> list[list[int]]:
    end = client.admin("describe", name="counted")["end"]
    with client.subscribe("counted", prefetch=10_000) as sub:
        found: list[list[int]] = []
        while len(found) < end:
            found += [message.json() for message in sub.batch(5000, 30.0)]
        return found


def staged(client: SyncClient) -> int:
    """How many messages are staged for the stream."""
    producers = client.admin("producers", name="counted")
    return sum(count for producer in producers for count in producer["staged"].values())


@contextlib.contextmanager
def tallied(
    node: Served, tmp_path: Path, snapshots: Snapshots | None = None, **sink: Any
) -> Iterator[Job]:
    by_value = [sys.modules[__name__], tallies, flows]
    options: dict[str, Any] = {"snapshots": snapshots or saved(tmp_path), "by_value": by_value}
    with flows.started(tallying(node, **sink), 2, **options) as job:
        yield job


def test_workers_die_the_flow_is_scaled_and_the_node_restarts(
    node: Served, client: SyncClient, tmp_path: Path
) -> None:
    client.ensure("records")
    client.ensure("counted")
    fill(client, 0, COUNT // 4)
    with tallied(node, tmp_path) as job:
        committed(job)
        kill(job, 1)
        recovered(job)
        fill(client, COUNT // 4, COUNT // 2)
        job.scale(3)
        committed(job)
        node.stop()
        node.start()
        fill(client, COUNT // 2, COUNT)
        job.scale(1)
        committed(job)
        flows.eventually(
            lambda: client.admin("describe", name="counted")["end"] >= COUNT, "all comes out"
        )
        assert job.stop(timeout=flows.DEADLINE)
    found = counted(client)
    assert sorted(found) == expected(COUNT)
    left = [one["name"] for one in client.admin("list") if one["name"].startswith("_")]
    assert left == []


def test_results_of_a_key_are_in_order_though_it_moves_within_one_snapshot(
    node: Served, client: SyncClient, tmp_path: Path
) -> None:
    client.ensure("records")
    client.ensure("counted")
    sizes = [4, 1, 3, 2]
    snapshots = saved(tmp_path, every=3600.0)
    with tallied(node, tmp_path, snapshots=snapshots) as job:
        for turn, size in enumerate(sizes):
            fill(client, turn * 4000, turn * 4000 + 2000)
            job.scale(size, wait=True)
            fill(client, turn * 4000 + 2000, turn * 4000 + 4000)
        count = 4000 * len(sizes)
        flows.eventually(lambda: staged(client) == count, "all is staged")
        assert client.admin("describe", name="counted")["end"] == 0
        assert job.stop(timeout=flows.DEADLINE)
    found = counted(client)
    assert sorted(found) == expected(count)
    for key in range(tallies.KEYS):
        assert [line for line in found if line[0] == key] == [
            line for line in expected(count) if line[0] == key
        ]


def test_a_second_run_goes_on_where_the_first_one_ended(
    node: Served, client: SyncClient, tmp_path: Path
) -> None:
    client.ensure("records")
    client.ensure("counted")
    for turn in range(3):
        fill(client, turn * 4000, (turn + 1) * 4000)
        with tallied(node, tmp_path) as job:
            flows.eventually(
                lambda: client.admin("describe", name="counted")["end"] >= (turn + 1) * 4000,  # noqa: B023
                "all comes out",
            )
            assert job.stop(timeout=flows.DEADLINE)
    assert sorted(counted(client)) == expected(12_000)


def test_at_least_once_loses_nothing(node: Served, client: SyncClient, tmp_path: Path) -> None:
    client.ensure("records")
    client.ensure("counted")
    fill(client, 0, 6000)
    with tallied(node, tmp_path, mode="at-least-once") as job:
        committed(job)
        kill(job, 0)
        recovered(job)
        fill(client, 6000, 12_000)
        flows.eventually(
            lambda: {tuple(line) for line in counted(client)} >= set(map(tuple, expected(12_000))),
            "all comes out",
        )
        assert job.stop(timeout=flows.DEADLINE)
    assert {tuple(line) for line in counted(client)} == set(map(tuple, expected(12_000)))
