"""Nodes that are listed: `static://10.0.0.1:7173,10.0.0.2:7173`.

Nobody is asked, so nothing can fail. Names are looked up by whoever dials them, each time anew.
"""

from __future__ import annotations

from railgun.broker.discovery.plugin import Address, Place


class Static:
    """A list.

    >>> import asyncio
    >>> asyncio.run(Static(Place.read("static://a:7173,b:7173")).find())
    [('a', 7173), ('b', 7173)]
    """

    def __init__(self, place: Place) -> None:
        place.know()
        if place.path:
            raise place.bad(
                "a list has no path; there is host:port, and a comma between two of them"
            )
        self._addresses = place.addresses()

    async def find(self) -> list[Address]:
        """All that are listed."""
        return list(self._addresses)

    async def announce(self, address: Address, node: str) -> None:
        """Nothing is to be done: whoever knows the list knows it."""

    async def close(self) -> None:
        """Nothing is to be done."""
