"""An announcement that is kept alive.

Rules:

1. What was announced is told again every `beat` seconds, until `close`: whoever keeps announcements forgets those of
   nodes that died, and may itself be restarted with nothing in it.
2. A failure is no end: it is told in the log, once for each kind, and tried again at the next beat.
3. Never two at once tell or withdraw, so the last word is the last one that was said.
4. `close` withdraws what may be there. What cannot be withdrawn is forgotten by those who keep it, in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from typing import Final

from railgun.broker.discovery.plugin import Address, DiscoveryError, Place

_LOG: Final = logging.getLogger(__name__)


class Kept(ABC):
    """What ways to find nodes have in common that keep an announcement."""

    def __init__(self, place: Place, timeout: float, beat: float) -> None:
        self._place, self._timeout, self._beat = place, timeout, beat
        self._told: tuple[Address, str] | None = None
        self._lock = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None
        self._closed = False

    @abstractmethod
    async def _tell(self, address: Address, node: str) -> None:
        """Tell others, or tell them that it is still so."""

    @abstractmethod
    async def _withdraw(self, node: str) -> None:
        """Take back what they were told."""

    async def announce(self, address: Address, node: str) -> None:
        """Tell others where this node is, from now on until `close`."""
        async with self._lock:
            if self._closed:
                raise self._place.failed("it was closed, and announces nothing more")
            if self._told is not None and self._told != (address, node):
                with contextlib.suppress(DiscoveryError):
                    await self._take_back(self._told[1])
            self._told = (address, node)
            if self._keeping is None:
                self._keeping = asyncio.create_task(self._keep())
            await self._tell_in_time()

    async def close(self) -> None:
        """Withdraw what was announced."""
        self._closed = True
        async with self._lock:
            if self._keeping is not None:
                self._keeping.cancel()
                await asyncio.wait([self._keeping])
                self._keeping = None
            told, self._told = self._told, None
            if told is not None:
                try:
                    await self._take_back(told[1])
                except DiscoveryError as error:
                    _LOG.warning(
                        "the announcement of node %s stays until it expires: %s", told[1], error
                    )

    async def _take_back(self, node: str) -> None:
        async with self._place.within(self._timeout):
            await self._withdraw(node)

    async def _tell_in_time(self) -> None:
        if self._told is not None and not self._closed:
            async with self._place.within(self._timeout):
                await self._tell(*self._told)

    async def _keep(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(self._beat)
            try:
                async with self._lock:
                    await self._tell_in_time()
            except DiscoveryError as error:
                if str(error) != said:
                    said = str(error)
                    _LOG.warning("others cannot be told where this node is: %s", said)
            else:
                if said:
                    said = ""
                    _LOG.info("others know again where this node is (%s)", self._place)
