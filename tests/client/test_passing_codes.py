"""Every error code says whether it may pass; a cluster without a leader for a while ends no flow."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.broker.outages import Processes, processes
from tests.engine.controller import flows, tallies
from tests.engine.controller.tallies import committed, expected, line_of, saved, tally

import railgun
from railgun import Flow, Generate, Streams, StreamSink
from railgun.cli.errors import NO_NODE, REFUSED, USAGE
from railgun.cli.node import command_error
from railgun.client.errors import StreamsError
from railgun.client.retries import call_with_retries
from railgun.client.sync import SyncClient
from railgun.errors import RailgunError
from railgun.job import Job
from railgun.transport.error_codes import CODES, may_pass, nothing_done, resent

COUNT = 6_000
OUTAGE_S = 20.0
BY_VALUE = [sys.modules[__name__], tallies, flows]


def _errors() -> Iterator[type[RailgunError]]:
    """All errors that a node, its cluster, its machines or a client can give."""
    for package in ("engine.protocol", "transport", "storage", "client", "broker"):
        path = [str(Path(railgun.__file__).parent / package.replace(".", "/"))]
        for module in pkgutil.walk_packages(path, f"railgun.{package}."):
            importlib.import_module(module.name)
    waiting = [RailgunError]
    while waiting:
        found = waiting.pop()
        waiting += found.__subclasses__()
        if found.__module__.startswith(
            ("railgun.errors", "railgun.engine.protocol.", "railgun.broker.", "railgun.client.")
        ):
            yield found


def test_each_code_of_a_node_says_whether_it_may_pass() -> None:
    codes = {error.code for error in _errors() if isinstance(getattr(error, "code", None), str)}  # type: ignore[attr-defined]
    assert len(codes) > 40
    assert codes - CODES.keys() == set(), "add them to transport/error_codes.py"


@pytest.mark.parametrize(
    "code", ["NO_LEADER", "NO_MASTER", "UNREACHABLE", "DEPOSED", "ID_POOL_FULL", "NO_SPACE"]
)
def test_outages_may_pass_for_clients_and_the_ends_of_flows(code: str) -> None:
    from railgun import ConnectorError
    from railgun.flows import errors
    from railgun.sources.streams import named as _named

    assert may_pass(code)
    with pytest.raises(ConnectorError) as told, _named("Streams('orders')"):
        raise StreamsError(code, "not now")
    assert errors.may_pass(told.value)


def test_what_a_client_repeats_by_itself_may_pass() -> None:
    assert {code for code in CODES if resent(code)} <= {code for code in CODES if may_pass(code)}
    assert nothing_done("NO_MASTER")
    assert not nothing_done("DEPOSED")
    assert not may_pass("NO_STREAM")


def test_commands_that_find_no_node_to_serve_them_end_with_the_exit_code_for_that() -> None:
    gone = {
        "NO_NODE", "CONNECTION_LOST", "DEADLINE", "CLOSED", "NO_MASTER", "DEPOSED", "NO_LEADER",
    }  # fmt: skip
    for code in (*CODES, "A_CODE_OF_A_LATER_VERSION"):
        expected = USAGE if code in ("BAD_SETTINGS", "BAD_REQUEST") else REFUSED
        told = command_error(StreamsError(code, "no"))
        assert told.code == (NO_NODE if code in gone else expected), code


def test_a_call_is_repeated_while_its_error_may_pass_and_no_longer() -> None:
    told: list[str] = []
    outcomes = iter(["NO_LEADER", "UNREACHABLE", "", "NO_STREAM"])

    def call() -> str:
        code = next(outcomes)
        if code:
            raise StreamsError(code, "")
        return "done"

    assert call_with_retries(call, waiting=lambda error: told.append(error.code)) == "done"
    assert told == ["NO_LEADER", "UNREACHABLE"]
    with pytest.raises(StreamsError, match="NO_STREAM"):
        call_with_retries(call)


# ---------------------------------------------------------------- a flow without a leader


def tallied(source: Any, nodes: Processes) -> Flow:
    """Numbered records, counted by key, into a stream."""
    flow = Flow("tallying")
    records = flow.source(source, name="records")
    # Slowly: there is output to write when the nodes are gone, so that the flow has to wait for them.
    slowly = records.inspect(lambda item: time.sleep(0.001), name="slowly")
    counted = slowly.key_by(lambda item: item[0], name="keys").stateful_map(
        tally, initial=int, name="tally"
    )
    counted.sink(StreamSink("counted", **ends(nodes)), name="out")
    return flow


def ends(nodes: Processes) -> dict[str, Any]:
    return {"node": ",".join(nodes.where()), "secret": nodes.secret}


def fill(client: SyncClient, first: int, end: int) -> None:
    lines = [json.dumps(line_of(n)[:2]) for n in range(first, end)]
    for at in range(0, len(lines), 500):
        client.publish_many("records", lines[at : at + 500], id=f"{first + at}")


def count(client: SyncClient) -> int:
    return int(client.admin("describe", name="counted")["end"])


def counted(client: SyncClient) -> list[list[int]]:
    end, found = count(client), list[list[int]]()
    with client.subscribe("counted", prefetch=10_000) as sub:
        while len(found) < end:
            found += [message.json() for message in sub.batch(5000, flows.DEADLINE)]
    return found


def without_a_leader(nodes: Processes, job: Job, outage_s: float = OUTAGE_S) -> None:
    """Two of three nodes are gone, until the flow has waited for a while; then they come back."""
    for name in ("n1", "n2"):
        nodes[name].kill()
    flows.eventually(lambda: "waiting" in kinds(job), "it says what it waits for")
    time.sleep(outage_s)
    assert job.status()["state"] == "running", job.events()
    for name in ("n1", "n2"):
        nodes[name].start()
    flows.eventually(lambda: {"goes-on", "finished"} & set(kinds(job)), "it goes on, and says so")


def kinds(job: Job) -> list[str]:
    return [event.kind for event in job.events()]


@pytest.mark.slow
def test_a_flow_from_stream_to_stream_waits_for_a_leader_and_goes_on(tmp_path: Path) -> None:
    counts_through_an_outage(tmp_path, OUTAGE_S)


@pytest.mark.slow
def test_a_flow_from_stream_to_stream_lives_through_a_minute_without_a_leader(
    tmp_path: Path,
) -> None:
    counts_through_an_outage(tmp_path, 60.0)


def counts_through_an_outage(tmp_path: Path, outage_s: float) -> None:
    """Let a flow count records of one stream into another, exactly once, though there is no leader for so long."""
    with processes(tmp_path / "nodes") as nodes:
        asyncio.run(nodes.ready("records"))
        asyncio.run(nodes.ready("counted"))
        flow = tallied(Streams("records", **ends(nodes)), nodes)
        options = {"snapshots": saved(tmp_path), "by_value": BY_VALUE}
        with nodes.sync_client() as client:
            fill(client, 0, COUNT // 2)
            with flows.started(flow, 2, **options) as job:
                committed(job)
                without_a_leader(nodes, job, outage_s)
                fill(client, COUNT // 2, COUNT)
                flows.eventually(lambda: count(client) >= COUNT, "all comes out")
                assert job.status()["failures"] == 0, job.events()
                assert job.stop(timeout=flows.DEADLINE)
            assert sorted(counted(client)) == expected(COUNT)


@pytest.mark.slow
def test_a_flow_without_snapshots_waits_for_a_leader_and_goes_on(tmp_path: Path) -> None:
    with processes(tmp_path / "nodes") as nodes:
        asyncio.run(nodes.ready("counted"))
        flow = tallied(Generate(tallies.record, rate=500, count=COUNT), nodes)
        with nodes.sync_client() as client, flows.started(flow, 2, by_value=BY_VALUE) as job:
            flows.eventually(lambda: count(client) > 0, "it begins")
            without_a_leader(nodes, job)
            flows.eventually(lambda: count(client) >= COUNT, "all comes out")
            assert job.wait(flows.DEADLINE)
            assert job.status()["failures"] == 0, job.events()
            assert sorted(counted(client)) == expected(COUNT)
