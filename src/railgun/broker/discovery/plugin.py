"""What a way to find nodes is: the interface, its errors, and how the text that chooses one is read.

Rules:

1. Text is `scheme://hosts/path?option=value&…`. Hosts are separated by commas; an address of IPv6 stands in brackets.
   What stands in an option is percent-encoded where it has `&`, `=` or `%`; a `+` is a plus.
2. Nothing is guessed: an option that is not known is refused, and so is a host without its port, or with two of them.
3. Options may be secrets. No error and no `repr` shows what stands in one.
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
TIMEOUT: Final = 5.0  # seconds to find out who is there, or to announce
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[\w.-]+))(?::(?P<port>[0-9]+))?", re.ASCII
)

_NAME: Final = re.compile(r"(?:[\w-]{1,63}\.)*[\w-]{1,63}\.?", re.ASCII)


class DiscoveryError(RailgunError):
    """It cannot be known who is there, or others cannot be told; it may be tried again."""

    code: ClassVar[str] = "DISCOVERY"


class BadDiscoveryError(RailgunError, ValueError):
    """The text that says how nodes are found is wrong."""

    code: ClassVar[str] = "BAD_DISCOVERY"


class Discovery(Protocol):
    """A way to find the other nodes of a cluster. It belongs to one node, and to the event loop it is used in."""

    async def find(self) -> list[Address]:
        """Who may be there now, this node among them or not; empty if there is nobody yet.

        It ends within a time of its own. `DiscoveryError` if it cannot be known.
        """

    async def announce(self, address: Address, node: str) -> None:
        """Tell others where this node is, from now on until `close`; if it was told before, this is where it is now.

        `DiscoveryError` if others could not be told yet: it is tried again and again, without another call.
        """

    async def close(self) -> None:
        """Withdraw what was announced, as far as that can be done, and end."""


@dataclass(frozen=True, slots=True)
class Place:
    """A text, taken apart.

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
    """Without slashes at its ends."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @staticmethod
    def read(text: str) -> Place:
        """Take a text apart; `BadDiscoveryError` if that cannot be done."""
        scheme, found, rest = text.partition("://")
        if not found or not _SCHEME.fullmatch(scheme):
            raise BadDiscoveryError(
                f"a text begins with a scheme, as static://, and not {scheme[:20]!r}"
            )
        rest, _, query = rest.partition("?")
        hosts, _, path = rest.partition("/")
        place = Place(scheme.lower(), hosts, path.strip("/"))
        if "@" in hosts:
            raise BadDiscoveryError(
                f"{scheme.lower()}://: there is an @ among its hosts; who one is, and one's password, are options"
            )
        options: dict[str, str] = {}
        for part in query.split("&") if query else ():
            name, found, value = part.partition("=")
            if not name or not found:
                raise place.bad("after its ? there is name=value, and & between two of them")
            if name in options:
                raise place.bad(f"{name} is there twice")
            options[name] = unquote(value)
        return Place(place.scheme, hosts, place.path, options)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.hosts}{'/' if self.path else ''}{self.path}"

    def bad(self, why: str) -> BadDiscoveryError:
        """That something is wrong with it."""
        return BadDiscoveryError(f"{self}: {why}")

    def failed(self, why: str) -> DiscoveryError:
        """That it was of no use this time."""
        return DiscoveryError(f"{self}: {why}")

    def know(self, *names: str) -> None:
        """These are the options there are; refuse others."""
        for name in self.options:
            if name not in names:
                there = f"there are {', '.join(names)}" if names else "it has none"
                raise self.bad(f"{name[:40]!r} is no option of {self.scheme}://; {there}")

    def addresses(self) -> list[Address]:
        """Its hosts, each once, each with its port."""
        return list(dict.fromkeys(self._address(one.strip()) for one in self.hosts.split(",")))

    def _address(self, text: str) -> Address:
        if not text:
            raise self.bad("a host is missing; there is host:port, and a comma between two of them")
        host, port = self.split(text)
        if port is None:
            raise self.bad(f"{text} has no port; write {text}:7173, with the port it listens on")
        return host, port

    def split(self, text: str) -> tuple[str, int | None]:
        """A host, and its port if there is one."""
        fits = _HOST.fullmatch(text)
        if fits is None:
            raise self.bad(
                f"{text[:80]!r} is no host; there is name:port, 10.0.0.1:port and [::1]:port"
            )
        host: str = fits["v6"] or fits["name"]
        if not is_host(host):
            raise self.bad(f"{host[:80]!r} cannot be a host; is it written right?")
        if fits["port"] is None:
            return host, None
        if len(fits["port"]) > 5 or not 0 < int(fits["port"]) < 65536:
            raise self.bad(f"{fits['port'][:20]} is no port; ports are 1 to 65535")
        return host, int(fits["port"])

    def flag(self, name: str) -> bool:
        """An option that is true or false; false if it is not there."""
        value = self.options.get(name, "false")
        if value not in ("true", "false"):
            raise self.bad(f"{name} is true or false")
        return value == "true"

    def number(self, name: str, default: float, least: float) -> float:
        """An option that is a number, such as seconds."""
        try:
            value = float(self.options.get(name, default))
        except ValueError:
            value = math.nan
        if not least <= value <= 3600:
            raise self.bad(f"{name} is a number of seconds, from {least:g} to 3600")
        return value

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """So long something may take; then it has failed."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise self.failed(
                f"no answer within {seconds:g} s. Is it reachable from here?"
            ) from None


def is_host(text: Any) -> bool:
    """Whether this can be dialled: an address, or a name with labels of at most 63 characters.

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
    """Whether that is where a node can be; it comes from others, so it may be anything."""
    return is_host(host) and type(port) is int and 0 < port < 65536


Maker = Callable[[Place], Discovery]
"""What makes a `Discovery` of a text; `BadDiscoveryError` if it is wrong. No connection is made yet."""
