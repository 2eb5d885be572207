"""Nodes as a service of Consul: `consul://127.0.0.1:8500/railgun`.

Rules:

1. There is one agent, the one of this machine: a service belongs to the agent it was registered with.
2. A node is an instance of the service, with a check that this node has to pass every `ttl` seconds (15 unless told)
   and passes three times as often. Who dies is no longer found then, and taken out a minute later.
3. If the agent does not know the check any more, the instance is registered anew.
4. Found are those that pass. That Consul leaves entries out which one may not see is an error, and not nobody: a
   cluster must not be made twice for want of a permission. It says so to who has a token. To who has none it does not,
   so nobody is an error then, if nothing is allowed that is not said to be.
5. An entry that cannot be read is passed over, and told in the log; if none can be, that is an error.
"""

from __future__ import annotations

import logging
from typing import Any, Final
from urllib.parse import quote

from railgun.broker.discovery.asking import Answer, Servers
from railgun.broker.discovery.keeping import Kept
from railgun.broker.discovery.plugin import TIMEOUT, Address, DiscoveryError, Place, is_address

TTL: Final = 15.0
REMOVED_AFTER: Final = "1m"  # the least Consul allows
_FILTERED: Final = "X-Consul-Results-Filtered-By-ACLs"
_POLICY: Final = "X-Consul-Default-ACL-Policy"
_LOG: Final = logging.getLogger(__name__)


class Consul(Kept):
    """Instances of a service."""

    def __init__(self, place: Place) -> None:
        place.know("token", "tls", "ca", "timeout", "ttl")
        agents = place.addresses()
        if len(agents) != 1:
            raise place.bad(
                "there is one agent, the one of this machine, as consul://127.0.0.1:8500/…"
            )
        if not place.path or "/" in place.path:
            raise place.bad(
                "it ends with the name of a service, as consul://127.0.0.1:8500/railgun"
            )
        self._ttl = place.number("ttl", TTL, 1)
        super().__init__(place, place.number("timeout", TIMEOUT, 0.1), self._ttl / 3)
        self._agent = Servers(place, agents, self._timeout)
        self._service = place.path
        self._registered: tuple[Address, str] | None = None
        token = place.options.get("token")
        self._headers = {} if token is None else {"X-Consul-Token": token}

    async def find(self) -> list[Address]:
        """Who passes its check."""
        path = f"/v1/health/service/{quote(self._service, safe='')}?passing=true"
        async with self._place.within(self._timeout):
            answer = await self._agent.ask("GET", path, headers=self._headers)
        if answer.status != 200:
            raise self._refused("tell who is there", answer)
        if not isinstance(answer.data, list):
            raise self._place.failed(
                f"that is no list of services: {answer.text[:80]!r}. Is it Consul?"
            )
        hidden = answer.headers.get(_FILTERED) == "true"
        if not self._headers:
            hidden = answer.headers.get(_POLICY) == "deny"
        if not answer.data and hidden:
            raise self._place.failed(
                f"nobody may be seen of {self._service}: give a token with service:read and node:read"
            )
        found = [address for one in answer.data if (address := self._read(one)) is not None]
        if answer.data and not found:
            raise self._place.failed(
                f"none of {len(answer.data)} entries has an address and a port"
            )
        return list(dict.fromkeys(found))

    async def _tell(self, address: Address, node: str) -> None:
        if self._registered == (address, node):
            check = quote(_check(self._id(node)), safe="")
            try:
                passed = await self._put(f"check/pass/{check}")
            except DiscoveryError:  # older agents say 500 of a check they do not know
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
        if answer.status not in (200, 404):  # it may never have got there
            raise self._refused("take this node out", answer)

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
                is_address(host, port)  # it is where its agent is
            ):
                return host, port
        _LOG.warning("%s: an entry has no address and port: %.200r", self._place, entry)
        return None

    def _refused(self, what: str, answer: Answer) -> DiscoveryError:
        said = f"Consul refuses to {what}: {answer.status} {answer.text}".strip()
        if answer.status in (401, 403):
            said += f". Its token needs service:write and service:read of {self._service}, and node:read"
        return self._place.failed(said)


def _check(instance: str) -> str:
    return f"service:{instance}"
