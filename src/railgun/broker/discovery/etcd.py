"""Find nodes by keys in etcd: `etcd://10.0.0.1:2379,10.0.0.2:2379/railgun/nodes`.

Rules:

1. A node is the key `/prefix/<node>`, with its address in JSON. The key is attached to a lease of `ttl` seconds
   (default 15), which is kept alive three times as often: a dead node's key is gone after that time.
2. At each beat the key is checked, too, and written if it is missing or differs. A lease that etcd no longer knows, as
   after a restore or a reset, is replaced by a new one.
3. The hosts are members of one etcd, asked in turn. Reads are linearizable: an etcd without a majority returns an error
   rather than old data.
4. With `user` and `password` a token is fetched, and again when etcd no longer knows it.
5. An unreadable entry is skipped and logged; if all are unreadable, that is an error.

The protocol is the JSON gateway of the v3 API, as in etcd 3.4 and later. 64-bit numbers are texts there.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import math
from typing import Any, Final

from railgun.broker.discovery.asking import Answer, Servers
from railgun.broker.discovery.keeping import KeptDiscovery
from railgun.broker.discovery.plugin import TIMEOUT_S, Address, DiscoveryError, Place, is_address

TTL_S: Final = 15.0
MAX_KEYS: Final = 10_000  # read at once
_OLD_TOKEN: Final = "revision of auth store is old"
_LOG: Final = logging.getLogger(__name__)


class Etcd(KeptDiscovery):
    """Discovery by etcd keys with a common prefix."""

    def __init__(self, place: Place) -> None:
        place.know("user", "password", "tls", "ca", "timeout", "ttl")
        members = place.addresses()
        if not place.path:
            raise place.bad(
                "end it with the prefix of the keys, as etcd://127.0.0.1:2379/railgun/nodes"
            )
        if ("user" in place.options) != ("password" in place.options):
            raise place.bad("user and password belong together: give both")
        ttl = place.number("ttl", TTL_S, 1)
        super().__init__(place, place.number("timeout", TIMEOUT_S, 0.1), ttl / 3)
        self._members = Servers(place, members, self._timeout)
        self._ttl = math.ceil(ttl)
        self._prefix = f"/{place.path}/"
        self._lease: str | None = None
        self._token: str | None = None

    async def find(self) -> list[Address]:
        """Return the addresses of all nodes that have a key."""
        begin = self._prefix.encode()
        end = begin[:-1] + bytes([begin[-1] + 1])  # the first key after those with the prefix
        request = {"key": _encode(begin), "range_end": _encode(end), "limit": MAX_KEYS}
        async with self._place.within(self._timeout):
            answer = await self._call("kv/range", request)
        entries = answer.data.get("kvs", [])  # etcd leaves kvs out if there are none
        if answer.status != 200:
            raise self._refused("list the nodes", answer)
        if not isinstance(entries, list) or "header" not in answer.data:
            raise self._place.failed(f"the answer has no keys: {answer.text[:80]!r}. Is it etcd?")
        addresses = [address for entry in entries if (address := self._read(entry)) is not None]
        if entries and not addresses:
            raise self._place.failed(
                f"none of {len(entries)} keys that begin with {self._prefix} has an address. Are they ours?"
            )
        return list(dict.fromkeys(addresses))

    # ------------------------------------------------------------ announcing

    async def _register(self, address: Address, node: str) -> None:
        if self._lease is not None and not await self._keep_alive(self._lease):
            self._lease = None
        if self._lease is not None:
            written = await self._write(self._lease, address, node)
            if written.status == 200:
                return
            if written.status != 404:  # 404: the lease has just ended
                raise self._refused("write the key of this node", written)
        self._lease = await self._grant()
        written = await self._write(self._lease, address, node)
        if written.status != 200:
            raise self._refused("write the key of this node", written)

    async def _withdraw(self, node: str) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:  # revoking the lease deletes its keys
            answer = await self._call("lease/revoke", {"ID": lease})
            if answer.status not in (200, 404):
                raise self._refused("remove this node", answer)

    async def _grant(self) -> str:
        answer = await self._call("lease/grant", {"TTL": self._ttl})
        lease = answer.data.get("ID")
        if answer.status != 200 or not isinstance(lease, str):
            raise self._refused("grant a lease", answer)
        return lease

    async def _keep_alive(self, lease: str) -> bool:
        """Extend a lease. Return whether etcd still knows it."""
        answer = await self._call("lease/keepalive", {"ID": lease})
        match answer.data:
            case {"result": {"TTL": str(left_s)}} if answer.status == 200:
                return left_s.isdecimal() and left_s.strip("0") != ""
        return False

    async def _write(self, lease: str, address: Address, node: str) -> Answer:
        """Write this node's key unless it has the right value and lease already."""
        key = _encode(f"{self._prefix}{node}".encode())
        text = json.dumps({"node": node, "host": address[0], "port": address[1]})
        value = _encode(text.encode())
        request = {
            "compare": [
                {"key": key, "target": "VALUE", "result": "EQUAL", "value": value},
                {"key": key, "target": "LEASE", "result": "EQUAL", "lease": lease},
            ],
            "failure": [{"requestPut": {"key": key, "value": value, "lease": lease}}],
        }
        return await self._call("kv/txn", request)

    def _read(self, entry: Any) -> Address | None:
        try:
            value = json.loads(base64.b64decode(entry["value"], validate=True))
            address = value["host"], value["port"]
            if is_address(*address):
                return address
        except (KeyError, TypeError, ValueError, RecursionError, binascii.Error):
            pass
        _LOG.warning("%s: a key has no address: %.200r", self._place, entry)
        return None

    # ------------------------------------------------------------ calls

    async def _call(self, name: str, request: dict[str, Any]) -> Answer:
        """Call the API, with a token if a user is set. The data of the answer is a dictionary."""
        if "user" not in self._place.options:
            return await self._ask(name, request, {})
        if self._token is not None:
            answer = await self._ask(name, request, {"Authorization": self._token})
            if not _is_unknown_token(answer):
                return answer
        self._token = await self._authenticate()
        return await self._ask(name, request, {"Authorization": self._token})

    async def _authenticate(self) -> str:
        options = self._place.options
        request = {"name": options["user"], "password": options["password"]}
        answer = await self._ask("auth/authenticate", request, {})
        token = answer.data.get("token")
        if answer.status != 200 or not isinstance(token, str):
            raise self._refused(f"let {options['user']} in", answer)
        return token

    async def _ask(self, name: str, request: dict[str, Any], headers: dict[str, str]) -> Answer:
        answer = await self._members.ask("POST", f"/v3/{name}", request, headers=headers)
        if not isinstance(answer.data, dict):
            shown = f"{answer.status} {answer.text[:80]!r}"
            raise self._place.failed(f"the answer is not from etcd 3.4 or newer: {shown}")
        return answer

    def _refused(self, what: str, answer: Answer) -> DiscoveryError:
        error_text = answer.data.get("message") or answer.data.get("error") or answer.text
        why = f"etcd refuses to {what}: {answer.status} {str(error_text)[:200]}"
        return self._place.failed(why)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _is_unknown_token(answer: Answer) -> bool:
    """Return whether etcd does not know the token, or it is older than the last change of permissions."""
    return answer.status == 401 or (answer.status == 400 and _OLD_TOKEN in answer.text)
