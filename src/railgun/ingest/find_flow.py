"""Where a flow takes streams: the addresses of its workers, and the secret.

A flow is named in one of three ways:

- by the name of a job on this machine (`transport.registry`);
- by the URL of its HTTP API, with its token;
- by addresses of its workers, `host:port` or several with commas between them, with the secret of the source.

In the first two cases it is looked up each time: workers come and go.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException

from railgun.ingest.errors import FeedError, NoFlowError, SourceError, TokenError
from railgun.transport.registry import Registry

TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    """Where to connect to."""

    addresses: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Flow:
    """A flow, as it is looked for."""

    where: str
    source: str | None = None
    """The name of its source, if it has several."""
    token: str | None = field(default=None, repr=False)
    secret: bytes | str | None = field(default=None, repr=False)
    registry: str | os.PathLike[str] | None = None

    def check(self) -> None:
        """Refuse what can never be found."""
        if ":" in self.where and "://" not in self.where:
            addresses_of(self.where)
            _secret(self.secret)

    async def find(self) -> Found:
        """Where it is now. Raises `NoFlowError` if it is not to be found, which may pass."""
        if "://" in self.where:
            return await asyncio.to_thread(self._ask, self.where, self.token or "")
        if ":" in self.where:
            return Found(addresses_of(self.where), _secret(self.secret))
        return await asyncio.to_thread(self._look_up)

    def _look_up(self) -> Found:
        entry = Registry(self.registry).find(self.where)
        if entry is None:
            raise NoFlowError(
                f"no job {self.where!r} runs on this machine: start it, or say where its workers are (host:port)"
            )
        try:
            return self._ask(entry.url, entry.token)
        except (
            TokenError
        ) as error:  # the file was of a job that has ended: the next look finds another
            raise NoFlowError(str(error)) from error

    def _ask(self, url: str, token: str) -> Found:
        request = urllib.request.Request(
            f"{url.rstrip('/')}/connectors", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                sources = json.load(answer)["sources"]
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise TokenError(f"{url} does not accept this token") from error
            raise NoFlowError(f"{url} answers {error.code}: {error.reason}") from error
        except (OSError, ValueError, KeyError, TypeError, HTTPException) as error:
            raise NoFlowError(f"nobody answers at {url}: {error}") from error
        named = {told["name"]: told for told in sources.values()}
        if not named:
            raise SourceError(f"{self.where} has no source that programs push to: Connectors(...)")
        if self.source is None and len(named) > 1:
            raise SourceError(f"{self.where} has several sources, say which: {', '.join(named)}")
        name = self.source if self.source is not None else next(iter(named))
        if name not in named:
            raise SourceError(f"{self.where} has no source {name!r}, but {', '.join(named)}")
        told = named[name]
        if not told["workers"]:
            raise NoFlowError(f"{self.where} starts: no worker listens yet")
        return Found(addresses_of(",".join(told["workers"])), bytes.fromhex(told["secret"]))


def addresses_of(told: str) -> tuple[tuple[str, int], ...]:
    """Addresses, as people write them: `host:port`, several with commas; an IPv6 one may be in brackets.

    >>> addresses_of("10.0.0.7:7300, [::1]:7301")
    (('10.0.0.7', 7300), ('::1', 7301))
    """
    found = []
    for one in told.split(","):
        host, _, port = one.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        if not port.isdigit() or not host or not 0 < int(port) < 1 << 16:
            raise FeedError(f"{one!r} is no address: host:port")
        found.append((host, int(port)))
    return tuple(found)


def _secret(told: bytes | str | None) -> bytes:
    told = told if told is not None else os.environ.get("RAILGUN_SECRET")
    if told is None:
        raise FeedError(
            "the secret of the source is needed: secret=..., or RAILGUN_SECRET, in hexadecimal digits"
        )
    try:
        return bytes.fromhex(told) if isinstance(told, str) else told
    except ValueError as error:
        raise FeedError(f"a secret is hexadecimal: {error}") from error
