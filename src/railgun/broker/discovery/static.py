"""Find nodes in a fixed list: `static://10.0.0.1:7173,10.0.0.2:7173`.

No server is asked, so nothing can fail. Host names are resolved at each dial.
"""

from __future__ import annotations

from railgun.broker.discovery.plugin import Address, Place


class Static:
    """Discovery by a fixed list.

    >>> import asyncio
    >>> asyncio.run(Static(Place.read("static://a:7173,b:7173")).find())
    [('a', 7173), ('b', 7173)]
    """

    def __init__(self, place: Place) -> None:
        place.know()
        if place.path:
            raise place.bad("a list has no path; write host:port, separated by commas")
        self._addresses = place.addresses()

    async def find(self) -> list[Address]:
        """Return all addresses of the list."""
        return list(self._addresses)

    async def announce(self, address: Address, node: str) -> None:
        """Do nothing: all nodes have the list."""

    async def close(self) -> None:
        """Do nothing: nothing was announced."""
