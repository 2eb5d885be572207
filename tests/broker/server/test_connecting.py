"""Who may connect to a node and by which socket, and clients whose node comes back."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest
from tests.broker.running import DEADLINE, Raw, node, process, run, stored, take, until

import railgun.client.client as client_module
from railgun.broker.server.server import Server, ServerConfig
from railgun.broker.streams.node import InUseError
from railgun.client.client import Client, connect
from railgun.client.errors import NoNodeError
from railgun.transport.listen_rules import BadSecretError, OpenListenError

# ---------------------------------------------------------------- reconnecting


def test_a_client_goes_on_when_its_node_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.ensure("news", kind="ephemeral")
            await client.publish_many("orders", [b"%d" % n for n in range(5)])
            tracked = await client.subscribe("orders", group="g")
            reader = await client.subscribe("orders")
            at_end = await client.subscribe("orders", start="end")
            from_offset = await client.subscribe("orders", start=4)
            news = await client.subscribe("news")
            (await tracked.next(DEADLINE)).ack()
            await tracked.flush()
            assert [m.offset for m in await take(reader, 2)] == [0, 1]
            await running.stop()
            await until(lambda: client._connection is None)
            waits = asyncio.create_task(client.publish("orders", b"5"))
            await asyncio.sleep(0.05)
            await running.start()
            async with asyncio.timeout(DEADLINE):
                assert await waits == 5
            assert [m.offset for m in await take(tracked, 5)] == [1, 2, 3, 4, 5]
            assert [m.offset for m in await take(reader, 4)] == [2, 3, 4, 5]
            assert [m.offset for m in await take(at_end, 1)] == [5]
            assert [m.offset for m in await take(from_offset, 2)] == [4, 5]
            assert await client.publish("news", b"x") == 1
            assert (await news.next(DEADLINE)).payload == b"x"

    run(main())


# ---------------------------------------------------------------- who may connect, and by which socket


def test_who_does_not_know_the_secret_is_refused_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            with pytest.raises(NoNodeError, match="secret"):
                await connect(f"127.0.0.1:{running.port}", secret=b"wrong" * 7, timeout=DEADLINE)
            raw = await Raw.dial(running, secret=b"wrong" * 7)
            assert "secret" in str(raw.error)
            assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600

    run(main())


@pytest.mark.parametrize("told", ["", "no secret", "00" * 15])
def test_a_file_without_a_secret_is_refused(tmp_path: Path, told: str) -> None:
    (tmp_path / "secret").write_text(told)

    async def main() -> None:
        with pytest.raises(BadSecretError, match="holds no secret"):
            await Server(ServerConfig(tmp_path, port=0)).start()

    run(main())


def family(client: Client) -> int:
    """Of the socket by which it is connected."""
    assert client._connection is not None
    return int(client._connection.transport.get_extra_info("socket").family)


def test_clients_of_the_same_machine_come_by_a_socket_in_the_directory(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            path = tmp_path / "node.sock"
            assert path.stat().st_mode & 0o777 == 0o600
            async with await connect(data=tmp_path, timeout=DEADLINE) as client:
                assert family(client) == socket.AF_UNIX
                await client.ensure("orders")
                large = [b"%d " % n + bytes(100_000) for n in range(50)]
                await client.publish_many("orders", large)
                assert await stored(client, "orders") == large
                await running.again()
                assert await client.publish("orders", b"x", id="x") == 50
                assert family(client) == socket.AF_UNIX
                path.unlink()
                async with await connect(data=tmp_path, timeout=DEADLINE) as other:
                    assert family(other) == socket.AF_INET
                    assert await other.publish("orders", b"y") == 51
            with pytest.raises(NoNodeError):
                await connect(data=tmp_path, secret="00" * 32, timeout=DEADLINE)
        assert not path.exists()

    run(main())


def test_a_directory_whose_name_is_too_long_for_a_socket_will_do(tmp_path: Path) -> None:
    async def main() -> None:
        data = tmp_path / ("d" * 120)
        async with node(data), await connect(data=data, timeout=DEADLINE) as client:
            assert family(client) == socket.AF_INET
            await client.ensure("orders")

    run(main())


def test_a_node_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with process(tmp_path) as running:
            client = await connect(data=tmp_path, timeout=DEADLINE)
            await client.close()
            await running.kill()
        with pytest.raises(NoNodeError, match="no node works in"):
            await connect(data=tmp_path, timeout=10 * DEADLINE)  # more than the test has

    run(main())


def test_another_version_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "VERSION", 99)

    async def main() -> None:
        async with node(tmp_path) as running:
            began = time.monotonic()
            with pytest.raises(NoNodeError, match="speaks version 1, and the client speaks 99"):
                await running.client()
            assert time.monotonic() - began < 2

    run(main())


def test_two_nodes_on_one_directory_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            with pytest.raises(InUseError):
                await Server(ServerConfig(tmp_path, port=0)).start()
            client = await running.client()
            assert (await client.ensure("orders"))["result"] == "CREATED"

    run(main())


def test_listening_openly_without_tls_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        for host in ("0.0.0.0", "::", "example.org"):
            with pytest.raises(OpenListenError):
                await Server(ServerConfig(tmp_path / "none", host=host, port=0)).start()
        assert not (tmp_path / "none").exists()

    run(main())
