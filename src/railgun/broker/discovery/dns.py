"""Find nodes by a DNS name: `dns://nodes.example:7173`, `dns+srv://_railgun._tcp.example`.

Rules:

1. `dns://` returns all addresses of a name (A and AAAA), with the given port. `dns+srv://` returns the targets of SRV
   records, lowest priority number first, each with its own port.
2. A name that does not exist, or has no such records, means that there are no nodes yet. A name server that does not
   answer, or answers with a failure, is an error: the nodes are unknown.
3. One answer is enough. If the IPv4 question is answered and the IPv6 question fails, the IPv4 addresses are returned;
   the same holds for the targets of SRV records.
4. The name servers and search domains are those of the machine, read anew each time, unless `?server=` names a server.
5. Records are made by others, such as an administrator or Kubernetes: there is nothing to announce.
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

from railgun.broker.discovery.plugin import TIMEOUT_S, Address, DiscoveryError, Place

MAX_TRIES: Final = 3  # a lost packet is sent again within the timeout
MAX_PARALLEL_QUESTIONS: Final = 16
DNS_PORT: Final = 53
Resolve = Callable[[dns.name.Name, RdataType], Awaitable[list[Any]]]


class Dns:
    """Discovery by the addresses of a name; with `services`, by the targets of its SRV records."""

    def __init__(self, place: Place, *, services: bool = False) -> None:
        place.know("server", "timeout")
        self._place, self._services = place, services
        self._timeout = place.number("timeout", TIMEOUT_S, 0.1)
        if not place.hosts or "," in place.hosts or place.path:
            example = "_railgun._tcp.example" if services else "nodes.example:7173"
            raise place.bad(f"give one name, as {place.scheme}://{example}")
        name, port = place.split(place.hosts)
        if services and port is not None:
            raise place.bad(
                "SRV records have ports of their own: leave the port out, or use dns://"
            )
        if not services and port is None:
            raise place.bad(
                f"the port is missing; write dns://{name}:7173, with the port that nodes listen on"
            )
        if _is_address(name):
            raise place.bad(f"{name} is an address, not a name; use static://")
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
            raise self._place.bad(f"server has to be an address, as 127.0.0.1:5353, not {host}")
        return host, port or DNS_PORT

    async def find(self) -> list[Address]:
        """Ask for the records."""
        async with self._place.within(self._timeout):
            try:
                resolver = self._resolver()
            except dns.exception.DNSException as error:
                why = f"this machine has no name servers ({error}); name one with ?server=address:port"
                raise self._place.failed(why) from error
            # Leaves time to return what was found.
            deadline = asyncio.get_running_loop().time() + 0.9 * self._timeout

            async def ask(name: dns.name.Name, kind: RdataType) -> list[Any]:
                left_s = deadline - asyncio.get_running_loop().time()
                return await self._ask(resolver, name, kind, max(left_s, 0.01))

            if self._services:
                return await _find_services(ask, self._name)
            return await _find_hosts(ask, self._name, self._port)

    async def announce(self, address: Address, node: str) -> None:
        """Do nothing: DNS records are made by others."""

    async def close(self) -> None:
        """Do nothing: the resolver keeps nothing open."""

    def _resolver(self) -> dns.asyncresolver.Resolver:
        resolver = dns.asyncresolver.Resolver(configure=self._server is None)
        if self._server is not None:
            resolver.nameservers, resolver.port = [self._server[0]], self._server[1]
        resolver.timeout = self._timeout / MAX_TRIES
        return resolver

    async def _ask(
        self,
        resolver: dns.asyncresolver.Resolver,
        name: dns.name.Name,
        kind: RdataType,
        seconds: float,
    ) -> list[Any]:
        search = self._server is None
        try:
            async with asyncio.timeout(seconds):  # the resolver may pause beyond its lifetime
                return list(await resolver.resolve(name, kind, search=search, lifetime=seconds))
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return []
        except (dns.exception.DNSException, OSError) as error:  # a TimeoutError is an OSError
            what = f"{kind.name} records of {name} cannot be read: {_error_text(error)}"
            raise self._place.failed(f"{what} Check the name server.") from error


async def _find_services(ask: Resolve, name: dns.name.Name) -> list[Address]:
    ranked = sorted(
        (record.priority, -record.weight, record.target, record.port)
        for record in await ask(name, SRV)
        if record.port
        and record.target != dns.name.root  # the root as target means: no service here
    )
    limit = asyncio.Semaphore(MAX_PARALLEL_QUESTIONS)

    async def addresses(target: dns.name.Name, port: int) -> list[Address]:
        async with limit:
            return await _find_hosts(ask, target, port)

    targets = (addresses(target, port) for _, _, target, port in ranked)
    return _merge(await asyncio.gather(*targets, return_exceptions=True))


async def _find_hosts(ask: Resolve, name: dns.name.Name, port: int) -> list[Address]:
    async def addresses(kind: RdataType) -> list[Address]:
        return sorted((str(record.address), port) for record in await ask(name, kind))

    return _merge(await asyncio.gather(addresses(A), addresses(AAAA), return_exceptions=True))


def _merge(results: Sequence[list[Address] | BaseException]) -> list[Address]:
    """Return all addresses without duplicates. Raise an error among the results if there are no addresses."""
    addresses = [address for result in results if isinstance(result, list) for address in result]
    for result in results:
        if isinstance(result, BaseException) and not (
            addresses and isinstance(result, DiscoveryError)
        ):
            raise result
    return list(dict.fromkeys(addresses))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _error_text(error: Exception) -> str:
    text = str(error).strip().rstrip(".") or type(error).__name__
    return f"{text[:300]}."
