"""Nodes that have a name: `dns://nodes.example:7173`, `dns+srv://_railgun._tcp.example`.

Rules:

1. `dns://` is all addresses of a name (A and AAAA), with the port that is written. `dns+srv://` is what SRV records
   name: lowest priority number first, each with its own port.
2. A name that does not exist, or has no such records, is nobody yet. A name server that does not answer, or answers
   that it cannot, is an error: nobody knows who is there.
3. One answer is enough to begin with. If IPv4 is known and the question for IPv6 fails, those of IPv4 are found; so it
   is with the targets of SRV records.
4. The name servers and search domains are those of the machine, read anew each time, unless `?server=` names one.
5. Records are made by somebody else, an administrator or Kubernetes: there is nothing to announce.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import dns.asyncresolver
import dns.exception
import dns.name
import dns.resolver
from dns.rdatatype import AAAA, SRV, A, RdataType

from railgun.broker.discovery.plugin import TIMEOUT, Address, DiscoveryError, Place

TRIES: Final = 3  # a lost packet is sent again within the time
AT_ONCE: Final = 16  # questions
DNS_PORT: Final = 53
Ask = Callable[[dns.name.Name, RdataType], Awaitable[list[Any]]]


class Dns:
    """The addresses of a name; with `services`, what its SRV records name."""

    def __init__(self, place: Place, *, services: bool = False) -> None:
        place.know("server", "timeout")
        self._place, self._services = place, services
        self._timeout = place.number("timeout", TIMEOUT, 0.1)
        if not place.hosts or "," in place.hosts or place.path:
            example = "_railgun._tcp.example" if services else "nodes.example:7173"
            raise place.bad(f"there is one name, as {place.scheme}://{example}")
        name, port = place.split(place.hosts)
        if services and port is not None:
            raise place.bad("SRV records have ports of their own: leave it out, or use dns://")
        if not services and port is None:
            raise place.bad(
                f"it has no port; write dns://{name}:7173, with the port nodes listen on"
            )
        if _is_address(name):
            raise place.bad(f"{name} is an address, and no name; use static://")
        try:
            self._name = dns.name.from_text(name, origin=None)
        except dns.exception.DNSException as error:
            raise place.bad(f"{name[:80]!r} cannot be a name: {error}") from error
        self._port = port or 0
        self._server = self._read_server(place.options.get("server"))

    def _read_server(self, text: str | None) -> Address | None:
        if text is None:
            return None
        host, port = self._place.split(text)
        if not _is_address(host):
            raise self._place.bad(f"server is an address, as 127.0.0.1:5353, and not {host}")
        return host, port or DNS_PORT

    async def find(self) -> list[Address]:
        """Ask for the records."""
        async with self._place.within(self._timeout):
            try:
                resolver = self._resolver()
            except dns.exception.DNSException as error:
                why = f"this machine has no name servers ({error}); name one with ?server=address:port"
                raise self._place.failed(why) from error
            end = asyncio.get_running_loop().time() + 0.9 * self._timeout  # to say what was found

            async def ask(name: dns.name.Name, kind: RdataType) -> list[Any]:
                left = end - asyncio.get_running_loop().time()
                return await self._ask(resolver, name, kind, max(left, 0.01))

            if self._services:
                return await _find_services(ask, self._name)
            return await _find_hosts(ask, self._name, self._port)

    async def announce(self, address: Address, node: str) -> None:
        """Nothing is to be done: records are made by somebody else."""

    async def close(self) -> None:
        """Nothing is to be done."""

    def _resolver(self) -> dns.asyncresolver.Resolver:
        made = dns.asyncresolver.Resolver(configure=self._server is None)
        if self._server is not None:
            made.nameservers, made.port = [self._server[0]], self._server[1]
        made.timeout = self._timeout / TRIES
        return made

    async def _ask(
        self,
        resolver: dns.asyncresolver.Resolver,
        name: dns.name.Name,
        kind: RdataType,
        seconds: float,
    ) -> list[Any]:
        search = self._server is None
        try:
            async with asyncio.timeout(seconds):  # the resolver may pause beyond its time
                return list(await resolver.resolve(name, kind, search=search, lifetime=seconds))
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return []
        except (dns.exception.DNSException, OSError) as error:  # that the time is up is an OSError
            what = f"{kind.name} records of {name} cannot be known: {_said(error)}"
            raise self._place.failed(f"{what} Look after the name server.") from error


async def _find_services(ask: Ask, name: dns.name.Name) -> list[Address]:
    ranked = sorted(
        (one.priority, -one.weight, one.target, one.port)
        for one in await ask(name, SRV)
        if one.port and one.target != dns.name.root  # the root says: not here
    )
    few = asyncio.Semaphore(AT_ONCE)

    async def addresses(target: dns.name.Name, port: int) -> list[Address]:
        async with few:
            return await _find_hosts(ask, target, port)

    targets = (addresses(target, port) for _, _, target, port in ranked)
    return _together(await asyncio.gather(*targets, return_exceptions=True))


async def _find_hosts(ask: Ask, name: dns.name.Name, port: int) -> list[Address]:
    async def addresses(kind: RdataType) -> list[Address]:
        return sorted((str(one.address), port) for one in await ask(name, kind))

    return _together(await asyncio.gather(addresses(A), addresses(AAAA), return_exceptions=True))


def _together(found: Sequence[list[Address] | BaseException]) -> list[Address]:
    """All addresses, each once. An error counts if there are none."""
    known = [address for one in found if isinstance(one, list) for address in one]
    for one in found:
        if isinstance(one, BaseException) and not (known and isinstance(one, DiscoveryError)):
            raise one
    return list(dict.fromkeys(known))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _said(error: Exception) -> str:
    said = str(error).strip().rstrip(".") or type(error).__name__
    return f"{said[:300]}."
