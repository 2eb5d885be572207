"""Nodes as keys of etcd: `etcd://10.0.0.1:2379,10.0.0.2:2379/railgun/nodes`.

Rules:

1. A node is the key `/prefix/<node>`, with its address in JSON. It hangs on a lease of `ttl` seconds (15 unless told),
   which is kept alive three times as often: who dies is forgotten by then.
2. At each beat the key is looked at, too, and written if it is not there as it should be. A lease that etcd does not
   know any more, as after it was restored or began anew, is made anew.
3. Hosts are members of one etcd, asked in turn. Reads are linearizable: an etcd without a majority says so, and does
   not show what once was.
4. With `user` and `password` a token is fetched, and again when etcd does not know it any more.
5. An entry that cannot be read is passed over, and told in the log; if none can be, that is an error.

It is the JSON gateway of the API v3, as of etcd 3.4 and later. Numbers of 64 bits are text there.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import math
from typing import Any, Final

from railgun.broker.discovery.asking import Answer, Servers
from railgun.broker.discovery.keeping import Kept
from railgun.broker.discovery.plugin import TIMEOUT, Address, DiscoveryError, Place, is_address

TTL: Final = 15.0
MOST: Final = 10_000  # keys that are read
_OLD_TOKEN: Final = "revision of auth store is old"
_LOG: Final = logging.getLogger(__name__)


class Etcd(Kept):
    """Keys with a common beginning."""

    def __init__(self, place: Place) -> None:
        place.know("user", "password", "tls", "ca", "timeout", "ttl")
        members = place.addresses()
        if not place.path:
            raise place.bad(
                "it ends with the beginning of keys, as etcd://127.0.0.1:2379/railgun/nodes"
            )
        if ("user" in place.options) != ("password" in place.options):
            raise place.bad("user and password belong together: give both")
        ttl = place.number("ttl", TTL, 1)
        super().__init__(place, place.number("timeout", TIMEOUT, 0.1), ttl / 3)
        self._members = Servers(place, members, self._timeout)
        self._ttl = math.ceil(ttl)
        self._prefix = f"/{place.path}/"
        self._lease: str | None = None
        self._token: str | None = None

    async def find(self) -> list[Address]:
        """Who has a key."""
        begin = self._prefix.encode()
        end = begin[:-1] + bytes([begin[-1] + 1])  # the first that does not begin so
        asked = {"key": _encode(begin), "range_end": _encode(end), "limit": MOST}
        async with self._place.within(self._timeout):
            answer = await self._call("kv/range", asked)
        entries = answer.data.get("kvs", [])  # it is not there if there are none
        if answer.status != 200:
            raise self._refused("tell who is there", answer)
        if not isinstance(entries, list) or "header" not in answer.data:
            raise self._place.failed(f"that are no keys: {answer.text[:80]!r}. Is it etcd?")
        found = [address for one in entries if (address := self._read(one)) is not None]
        if entries and not found:
            raise self._place.failed(
                f"none of {len(entries)} keys that begin with {self._prefix} has an address. Are they ours?"
            )
        return list(dict.fromkeys(found))

    # ------------------------------------------------------------ announcing

    async def _tell(self, address: Address, node: str) -> None:
        if self._lease is not None and not await self._keep_alive(self._lease):
            self._lease = None
        if self._lease is not None:
            written = await self._write(self._lease, address, node)
            if written.status == 200:
                return
            if written.status != 404:  # that is a lease which has ended just now
                raise self._refused("write the key of this node", written)
        self._lease = await self._grant()
        written = await self._write(self._lease, address, node)
        if written.status != 200:
            raise self._refused("write the key of this node", written)

    async def _withdraw(self, node: str) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:  # its keys go with it
            answer = await self._call("lease/revoke", {"ID": lease})
            if answer.status not in (200, 404):
                raise self._refused("take this node out", answer)

    async def _grant(self) -> str:
        answer = await self._call("lease/grant", {"TTL": self._ttl})
        lease = answer.data.get("ID")
        if answer.status != 200 or not isinstance(lease, str):
            raise self._refused("grant a lease", answer)
        return lease

    async def _keep_alive(self, lease: str) -> bool:
        """Whether there is such a lease; then it lives longer."""
        answer = await self._call("lease/keepalive", {"ID": lease})
        match answer.data:
            case {"result": {"TTL": str(left)}} if answer.status == 200:
                return left.isdecimal() and left.strip("0") != ""
        return False

    async def _write(self, lease: str, address: Address, node: str) -> Answer:
        """Write the key, if it is not there as it should be."""
        key = _encode(f"{self._prefix}{node}".encode())
        text = json.dumps({"node": node, "host": address[0], "port": address[1]})
        value = _encode(text.encode())
        asked = {
            "compare": [
                {"key": key, "target": "VALUE", "result": "EQUAL", "value": value},
                {"key": key, "target": "LEASE", "result": "EQUAL", "lease": lease},
            ],
            "failure": [{"requestPut": {"key": key, "value": value, "lease": lease}}],
        }
        return await self._call("kv/txn", asked)

    def _read(self, entry: Any) -> Address | None:
        try:
            told = json.loads(base64.b64decode(entry["value"], validate=True))
            address = told["host"], told["port"]
            if is_address(*address):
                return address
        except (KeyError, TypeError, ValueError, RecursionError, binascii.Error):
            pass
        _LOG.warning("%s: a key has no address: %.200r", self._place, entry)
        return None

    # ------------------------------------------------------------ calls

    async def _call(self, name: str, asked: dict[str, Any]) -> Answer:
        """A call, with a token if there has to be one. The answer's data is a dictionary."""
        if "user" not in self._place.options:
            return await self._ask(name, asked, {})
        if self._token is not None:
            answer = await self._ask(name, asked, {"Authorization": self._token})
            if not _is_unknown_token(answer):
                return answer
        self._token = await self._authenticate()
        return await self._ask(name, asked, {"Authorization": self._token})

    async def _authenticate(self) -> str:
        options = self._place.options
        asked = {"name": options["user"], "password": options["password"]}
        answer = await self._ask("auth/authenticate", asked, {})
        token = answer.data.get("token")
        if answer.status != 200 or not isinstance(token, str):
            raise self._refused(f"let {options['user']} in", answer)
        return token

    async def _ask(self, name: str, asked: dict[str, Any], headers: dict[str, str]) -> Answer:
        answer = await self._members.ask("POST", f"/v3/{name}", asked, headers=headers)
        if not isinstance(answer.data, dict):
            told = f"{answer.status} {answer.text[:80]!r}"
            raise self._place.failed(
                f"that is no answer of etcd: {told}. It has to be 3.4 or newer"
            )
        return answer

    def _refused(self, what: str, answer: Answer) -> DiscoveryError:
        said = answer.data.get("message") or answer.data.get("error") or answer.text
        why = f"etcd refuses to {what}: {answer.status} {str(said)[:200]}"
        return self._place.failed(why)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _is_unknown_token(answer: Answer) -> bool:
    """Whether it is not known any more, or was made before rights were changed."""
    return answer.status == 401 or (answer.status == 400 and _OLD_TOKEN in answer.text)
