"""Find nodes as instances of a Consul service: `consul://127.0.0.1:8500/railgun`.

Rules:

1. There is one agent, that of this machine: a service belongs to the agent where it was registered.
2. A node is an instance of the service, with a check that the node has to pass every `ttl` seconds (default 15); it
   passes the check three times as often. A dead node is no longer found after that time, and is removed a minute later.
3. If the agent no longer knows the check, the instance is registered again.
4. Instances that pass their check are found. If Consul leaves out entries that the token may not see, that is an error,
   not an empty result: a cluster must not be formed twice for want of a permission. Consul reports such filtering to
   clients with a token. To clients without a token it does not, so for them an empty result is an error if the default
   policy denies.
5. An unreadable entry is skipped and logged; if all are unreadable, that is an error.
"""

from __future__ import annotations

import logging
from typing import Any, Final
from urllib.parse import quote

from railgun.broker.discovery.asking import Answer, Servers
from railgun.broker.discovery.keeping import KeptDiscovery
from railgun.broker.discovery.plugin import TIMEOUT_S, Address, DiscoveryError, Place, is_address

TTL_S: Final = 15.0
REMOVED_AFTER: Final = "1m"  # the minimum of Consul
_FILTERED: Final = "X-Consul-Results-Filtered-By-ACLs"
_POLICY: Final = "X-Consul-Default-ACL-Policy"
_LOG: Final = logging.getLogger(__name__)


class Consul(KeptDiscovery):
    """Discovery by the instances of a Consul service."""

    def __init__(self, place: Place) -> None:
        place.know("token", "tls", "ca", "timeout", "ttl")
        agents = place.addresses()
        if len(agents) != 1:
            raise place.bad("name one agent, that of this machine, as consul://127.0.0.1:8500/…")
        if not place.path or "/" in place.path:
            raise place.bad("end it with the name of a service, as consul://127.0.0.1:8500/railgun")
        self._ttl = place.number("ttl", TTL_S, 1)
        super().__init__(place, place.number("timeout", TIMEOUT_S, 0.1), self._ttl / 3)
        self._agent = Servers(place, agents, self._timeout)
        self._service = place.path
        self._registered: tuple[Address, str] | None = None
        token = place.options.get("token")
        self._headers = {} if token is None else {"X-Consul-Token": token}

    async def find(self) -> list[Address]:
        """Return the addresses of instances that pass their check."""
        path = f"/v1/health/service/{quote(self._service, safe='')}?passing=true"
        async with self._place.within(self._timeout):
            answer = await self._agent.ask("GET", path, headers=self._headers)
        if answer.status != 200:
            raise self._refused("list the nodes", answer)
        if not isinstance(answer.data, list):
            raise self._place.failed(
                f"the answer is no list of services: {answer.text[:80]!r}. Is it Consul?"
            )
        hidden = answer.headers.get(_FILTERED) == "true"
        if not self._headers:
            hidden = answer.headers.get(_POLICY) == "deny"
        if not answer.data and hidden:
            raise self._place.failed(
                f"no entry of {self._service} may be seen: give a token with service:read and node:read"
            )
        addresses = [address for entry in answer.data if (address := self._read(entry)) is not None]
        if answer.data and not addresses:
            raise self._place.failed(
                f"none of {len(answer.data)} entries has an address and a port"
            )
        return list(dict.fromkeys(addresses))

    async def _register(self, address: Address, node: str) -> None:
        if self._registered == (address, node):
            check = quote(_check(self._id(node)), safe="")
            try:
                passed = await self._put(f"check/pass/{check}")
            except DiscoveryError:  # older agents answer 500 for an unknown check
                self._registered = None
            else:
                if passed.status == 200:
                    return
        self._registered = None
        answer = await self._put(
            "service/register?replace-existing-checks=true", self._instance(address, node)
        )
        if answer.status != 200:
            raise self._refused("register this node", answer)
        self._registered = (address, node)

    async def _withdraw(self, node: str) -> None:
        self._registered = None
        answer = await self._put(f"service/deregister/{quote(self._id(node), safe='')}")
        if answer.status not in (200, 404):  # 404: the registration may never have arrived
            raise self._refused("remove this node", answer)

    def _instance(self, address: Address, node: str) -> dict[str, Any]:
        return {
            "ID": self._id(node),
            "Name": self._service,
            "Address": address[0],
            "Port": address[1],
            "Meta": {"railgun-node": node},
            "Check": {
                "CheckID": _check(self._id(node)),
                "Name": "this node is alive",
                "TTL": f"{self._ttl:g}s",
                "Status": "passing",
                "DeregisterCriticalServiceAfter": REMOVED_AFTER,
            },
        }

    def _id(self, node: str) -> str:
        return f"{self._service}-{node}"

    async def _put(self, path: str, body: Any = None) -> Answer:
        path = f"/v1/agent/{path}"
        return await self._agent.ask("PUT", path, body, headers=self._headers, json_only=False)

    def _read(self, entry: Any) -> Address | None:
        match entry:
            case {"Service": {"Address": host, "Port": port}} if is_address(host, port):
                return host, port
            case {"Service": {"Address": "", "Port": port}, "Node": {"Address": host}} if (
                is_address(host, port)  # an instance without an address is on its agent's host
            ):
                return host, port
        _LOG.warning("%s: an entry has no address and port: %.200r", self._place, entry)
        return None

    def _refused(self, what: str, answer: Answer) -> DiscoveryError:
        error_text = f"Consul refuses to {what}: {answer.status} {answer.text}".strip()
        if answer.status in (401, 403):
            error_text += f". Its token needs service:write and service:read of {self._service}, and node:read"
        return self._place.failed(error_text)


def _check(instance: str) -> str:
    return f"service:{instance}"
