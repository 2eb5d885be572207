"""A connector ends whenever it is told to, whatever happens in that moment."""

from __future__ import annotations

import asyncio

import pytest
from tests.ingest.acting_worker import acted, client, until, worker

from railgun.ingest import RefusedError


@pytest.mark.parametrize("turns", range(4))
def test_closing_in_the_moment_in_which_the_connection_is_lost(turns: int) -> None:
    async def main() -> None:
        async with worker() as (_, where):
            c = client(where)
            await c.open()
            assert c._link.connection is not None
            c._link.connection.transport.abort()
            for _ in range(turns):
                await asyncio.sleep(0)
            await c.close()
            await c.close()

    acted(main())


def test_leaving_with_a_refusal_raises_it() -> None:
    async def main() -> None:
        async with worker(bad={b"x"}) as (_, where):
            with pytest.raises(RefusedError, match="it is bad"):
                async with client(where) as c:
                    await c.feed("a", [(0, "x")])
            assert not c.connected

    acted(main())


def test_closing_that_is_cancelled_says_so() -> None:
    async def main() -> None:
        async with worker() as (_, where):
            c = client(where)
            await c.open()
            closing = asyncio.create_task(c.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            assert closing.cancelled()
            await until(lambda: not c.connected)

    acted(main())
