"""Define the interface of discoveries and their errors, and parse the text that chooses one.

Rules:

1. The text is `scheme://hosts/path?option=value&…`. Hosts are separated by commas; an IPv6 address stands in brackets.
   In option values `&`, `=` and `%` are percent-encoded; a `+` is a plus.
2. Nothing is guessed: an unknown option is refused, and so is a host without a port where one is needed, or with two
   ports.
3. Options may be secrets. No error and no `repr` shows their values.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol
from urllib.parse import unquote

from railgun.errors import RailgunError

Address = tuple[str, int]
"""A host and a port."""
TIMEOUT_S: Final = 5.0  # to find nodes, or to announce one
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[\w.-]+))(?::(?P<port>[0-9]+))?", re.ASCII
)

_NAME: Final = re.compile(r"(?:[\w-]{1,63}\.)*[\w-]{1,63}\.?", re.ASCII)


class DiscoveryError(RailgunError):
    """Nodes cannot be found, or an announcement cannot be made, for now; the call may be tried again."""

    code: ClassVar[str] = "DISCOVERY"


class BadDiscoveryError(RailgunError, ValueError):
    """The text that chooses a discovery is wrong."""

    code: ClassVar[str] = "BAD_DISCOVERY"


class Discovery(Protocol):
    """A way to find the other nodes of a cluster. It belongs to one node, and to the event loop it is used in."""

    async def find(self) -> list[Address]:
        """Return addresses of possible nodes, with or without this node's; an empty list if there are none yet.

        The call ends within a timeout of its own. Raise `DiscoveryError` if the nodes cannot be found out.
        """

    async def announce(self, address: Address, node: str) -> None:
        """Announce this node's address from now on until `close`. A later call replaces an earlier one.

        Raise `DiscoveryError` if the announcement has not succeeded yet: it is repeated without another call.
        """

    async def close(self) -> None:
        """Withdraw the announcement, as far as possible, and release everything."""


@dataclass(frozen=True, slots=True)
class Place:
    """A parsed discovery text.

    >>> place = Place.read("etcd://10.0.0.1:2379,[::1]:2379/railgun/nodes?user=ann&password=s%26t")
    >>> place
    Place(scheme='etcd', hosts='10.0.0.1:2379,[::1]:2379', path='railgun/nodes')
    >>> place.addresses()
    [('10.0.0.1', 2379), ('::1', 2379)]
    >>> place.options["password"]
    's&t'
    """

    scheme: str
    hosts: str
    path: str = ""
    """The path without slashes at its ends."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @staticmethod
    def read(text: str) -> Place:
        """Parse a text. Raise `BadDiscoveryError` if it is wrong."""
        scheme, separator, rest = text.partition("://")
        if not separator or not _SCHEME.fullmatch(scheme):
            raise BadDiscoveryError(
                f"the text has to begin with a scheme, such as static://, not with {scheme[:20]!r}"
            )
        rest, _, query = rest.partition("?")
        hosts, _, path = rest.partition("/")
        place = Place(scheme.lower(), hosts, path.strip("/"))
        if "@" in hosts:
            raise BadDiscoveryError(
                f"{scheme.lower()}://: there is an @ among the hosts; a user and a password are given as options"
            )
        options: dict[str, str] = {}
        for part in query.split("&") if query else ():
            name, separator, value = part.partition("=")
            if not name or not separator:
                raise place.bad("options are name=value, separated by &")
            if name in options:
                raise place.bad(f"{name} is given twice")
            options[name] = unquote(value)
        return Place(place.scheme, hosts, place.path, options)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.hosts}{'/' if self.path else ''}{self.path}"

    def bad(self, why: str) -> BadDiscoveryError:
        """Return an error that says why the text is wrong."""
        return BadDiscoveryError(f"{self}: {why}")

    def failed(self, why: str) -> DiscoveryError:
        """Return an error that says why the discovery failed this time."""
        return DiscoveryError(f"{self}: {why}")

    def know(self, *names: str) -> None:
        """Refuse options other than `names`. Raise `BadDiscoveryError` for an unknown option."""
        for name in self.options:
            if name not in names:
                allowed = f"its options are {', '.join(names)}" if names else "it has none"
                raise self.bad(f"{name[:40]!r} is not an option of {self.scheme}://; {allowed}")

    def addresses(self) -> list[Address]:
        """Return the hosts without duplicates, each with its port. Raise `BadDiscoveryError` if a port is missing."""
        return list(dict.fromkeys(self._address(text.strip()) for text in self.hosts.split(",")))

    def _address(self, text: str) -> Address:
        if not text:
            raise self.bad("a host is missing; write host:port, separated by commas")
        host, port = self.split(text)
        if port is None:
            raise self.bad(
                f"{text} has no port; write {text}:7173, with the port that the node listens on"
            )
        return host, port

    def split(self, text: str) -> tuple[str, int | None]:
        """Split a text into a host and a port, or None without one. Raise `BadDiscoveryError` if it is wrong."""
        match = _HOST.fullmatch(text)
        if match is None:
            raise self.bad(
                f"{text[:80]!r} is not a host; write name:port, 10.0.0.1:port or [::1]:port"
            )
        host: str = match["v6"] or match["name"]
        if not is_host(host):
            raise self.bad(f"{host[:80]!r} is not a valid host")
        if match["port"] is None:
            return host, None
        if len(match["port"]) > 5 or not 0 < int(match["port"]) < 65536:
            raise self.bad(f"{match['port'][:20]} is not a port; ports are 1 to 65535")
        return host, int(match["port"])

    def flag(self, name: str) -> bool:
        """Return an option that is true or false; false without it."""
        value = self.options.get(name, "false")
        if value not in ("true", "false"):
            raise self.bad(f"{name} has to be true or false")
        return value == "true"

    def number(self, name: str, default: float, least: float) -> float:
        """Return an option that is a number of seconds. Raise `BadDiscoveryError` if it is below `least` or above
        3600."""
        try:
            value = float(self.options.get(name, default))
        except ValueError:
            value = math.nan
        if not least <= value <= 3600:
            raise self.bad(f"{name} has to be a number of seconds from {least:g} to 3600")
        return value

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Raise `DiscoveryError` if the body takes longer than `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise self.failed(
                f"no answer within {seconds:g} s. Is it reachable from here?"
            ) from None


def is_host(text: Any) -> bool:
    """Return whether `text` can be dialled: an address, or a name with labels of at most 63 characters.

    >>> [is_host(text) for text in ("::1", "10.0.0.1", "a.b", "a..b", 64 * "a", "ä", "", None)]
    [True, True, True, False, False, False, False, False]
    """
    if not isinstance(text, str) or len(text) > 253:
        return False
    if ":" not in text:
        return _NAME.fullmatch(text) is not None
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_address(host: Any, port: Any) -> bool:
    """Return whether a host and a port can be a node's address. They come from other nodes, and may be anything."""
    return is_host(host) and type(port) is int and 0 < port < 65536


Maker = Callable[[Place], Discovery]
"""Makes a `Discovery` of a parsed text without connecting anywhere; raises `BadDiscoveryError` if the text is wrong."""
