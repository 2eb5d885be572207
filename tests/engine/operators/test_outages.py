"""What sources and sinks wait for: told while it lasts, thread by thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from railgun.client.errors import StreamsError
from railgun.client.outages import OUTAGES, SETTLED_S, Outages
from railgun.client.retrying_client import RetryingClient


def test_a_sink_that_goes_on_in_one_thread_still_waits_in_another() -> None:
    now = [0.0]
    outages = Outages(lambda: now[0])
    outages.begin("sink", "no master", blocks=True)
    here = threading.get_ident()
    with ThreadPoolExecutor(1) as other:
        there = other.submit(threading.get_ident).result()
        other.submit(outages.begin, "sink", "no quorum", blocks=True).result()
        assert outages.blocks(here)
        assert outages.blocks(there)
        now[0] = SETTLED_S
        assert outages.describe() == "sink: no master; sink: no quorum"
        other.submit(outages.end, "sink").result()
        assert outages.blocks(here)
        assert not outages.blocks(there)
        assert outages.describe() == "sink: no master"
    outages.end("sink")
    assert outages.describe() == ""


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_a_call_that_is_refused_again_and_again_is_one_wait(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Each attempt fails at once: the wait must not begin anew with each, or nobody is told of it."""
    healed = threading.Event()

    async def admin(call: str) -> str:
        if not healed.is_set():
            raise StreamsError("NO_MASTER", "there is none")
        return call

    client = SimpleNamespace(loop=loop, client=SimpleNamespace(admin=admin, closing=False))
    node = RetryingClient(cast(Any, client), "sink 'out'")
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(node.admin, "list")
        end = time.monotonic() + 30.0
        while not OUTAGES.describe():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert OUTAGES.describe() == "sink 'out': there is none (NO_MASTER)"
        healed.set()
        assert answer.result(30.0) == "list"
        assert OUTAGES.describe() == ""
