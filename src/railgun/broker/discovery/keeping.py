"""Keep an announcement alive.

Rules:

1. An announcement is repeated every `beat_s` seconds, until `close`: registries forget the announcements of dead nodes,
   and may themselves be restarted empty.
2. A failure does not end it: it is logged, once for each error text in a row, and tried again at the next beat.
3. Announcing and withdrawing never run at the same time, so the last call decides.
4. `close` withdraws the announcement. If that fails, the registry forgets it in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from typing import Final

from railgun.broker.discovery.plugin import Address, DiscoveryError, Place

_LOG: Final = logging.getLogger(__name__)


class KeptDiscovery(ABC):
    """Base class of discoveries that keep an announcement alive in a registry."""

    def __init__(self, place: Place, timeout: float, beat_s: float) -> None:
        self._place, self._timeout, self._beat_s = place, timeout, beat_s
        self._announced: tuple[Address, str] | None = None
        self._lock = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None
        self._closed = False

    @abstractmethod
    async def _register(self, address: Address, node: str) -> None:
        """Announce this node's address to the registry, or renew the announcement."""

    @abstractmethod
    async def _withdraw(self, node: str) -> None:
        """Remove the announcement of `node` from the registry."""

    async def announce(self, address: Address, node: str) -> None:
        """Announce this node's address, from now on until `close`."""
        async with self._lock:
            if self._closed:
                raise self._place.failed("it is closed and can announce nothing more")
            if self._announced is not None and self._announced != (address, node):
                with contextlib.suppress(DiscoveryError):
                    await self._take_back(self._announced[1])
            self._announced = (address, node)
            if self._keeping is None:
                self._keeping = asyncio.create_task(self._keep())
            await self._announce_now()

    async def close(self) -> None:
        """Withdraw the announcement, and announce nothing more."""
        self._closed = True
        async with self._lock:
            if self._keeping is not None:
                self._keeping.cancel()
                await asyncio.wait([self._keeping])
                self._keeping = None
            announced, self._announced = self._announced, None
            if announced is not None:
                try:
                    await self._take_back(announced[1])
                except DiscoveryError as error:
                    _LOG.warning(
                        "the announcement of node %s stays until it expires: %s",
                        announced[1],
                        error,
                    )

    async def _take_back(self, node: str) -> None:
        async with self._place.within(self._timeout):
            await self._withdraw(node)

    async def _announce_now(self) -> None:
        if self._announced is not None and not self._closed:
            async with self._place.within(self._timeout):
                await self._register(*self._announced)

    async def _keep(self) -> None:
        error_text = ""
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                async with self._lock:
                    await self._announce_now()
            except DiscoveryError as error:
                if str(error) != error_text:
                    error_text = str(error)
                    _LOG.warning("this node's address cannot be announced: %s", error_text)
            else:
                if error_text:
                    error_text = ""
                    _LOG.info("this node's address is announced again (%s)", self._place)
