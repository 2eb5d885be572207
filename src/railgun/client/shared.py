"""Share one client of each node among all sources and sinks of a process, however many parts they read."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from railgun.client.address import Address
from railgun.client.errors import StreamsError

if TYPE_CHECKING:
    from railgun.client.sync import SyncClient

TIMEOUT_S: Final = 30.0


class NodeAddress:
    """Find the address of a node now, or when it is first needed."""

    def __init__(self, where: str | None, secret: bytes | str | None, data: str | Path) -> None:
        self._search = (where, secret, Path(data).absolute())
        self._address: Address | None = None
        with contextlib.suppress(StreamsError):
            self.address()

    def address(self) -> Address:
        """Return the address; raise `StreamsError` if no node can be found."""
        if self._address is None:
            where, secret, data = self._search
            self._address = Address.find(where, secret=secret, data=data)
        return self._address


class SharedClients:
    """Share one client for each node among all users of this process; close it with its last user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[tuple[int, Address], tuple[SyncClient, int]] = {}

    @contextlib.contextmanager
    def use(self, node: NodeAddress) -> Iterator[SyncClient]:
        """Yield the client of `node`, and release it at the end of the block."""
        client = self.take(node)
        try:
            yield client
        finally:
            self.release(client)

    def take(self, node: NodeAddress) -> SyncClient:
        """Return the client of `node`, connected; the caller must `release` it."""
        from railgun.client.sync import connect_to

        address = node.address()
        key = (os.getpid(), address)  # threads do not survive a fork
        with self._lock:
            if key not in self._clients:
                self._clients[key] = (connect_to(address, name="flow", timeout=TIMEOUT_S), 0)
            client, users = self._clients[key]
            self._clients[key] = (client, users + 1)
            return client

    def release(self, client: SyncClient) -> None:
        """Release a client that `take` returned; close it if it has no other user."""
        with self._lock:
            for key, (shared, users) in list(self._clients.items()):
                if shared is client:
                    if users > 1:
                        self._clients[key] = (client, users - 1)
                        return
                    del self._clients[key]
        client.close()


SHARED_CLIENTS: Final = SharedClients()
