"""Find where a flow accepts streams: the addresses of its workers, and the secret.

A flow is named in one of three ways:

- by the name of a job on this machine (`transport.registry`);
- by the URL of its HTTP API, with its token;
- by the addresses of its workers, `host:port`, separated by commas, with the secret of the source.

In the first two cases the addresses are looked up before each connection, since workers come and go.
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

LOOKUP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a flow's workers, and the secret that they require."""

    addresses: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Flow:
    """The description by which a flow is found: name, URL or addresses, and what authorizes the connector."""

    where: str
    source: str | None = None
    """The name of the flow's source; needed only if the flow has several."""
    token: str | None = field(default=None, repr=False)
    secret: bytes | str | None = field(default=None, repr=False)
    registry: str | os.PathLike[str] | None = None

    def check(self) -> None:
        """Raise `FeedError` if the description is invalid, so that the flow can never be found."""
        if ":" in self.where and "://" not in self.where:
            addresses_of(self.where)
            _secret(self.secret)

    async def find(self) -> Endpoints:
        """Return the flow's endpoints.

        Raises `NoFlowError` if the flow does not run or does not answer, which may be transient; `TokenError` if the
        job does not accept the token; `SourceError` if the flow has no such source, or several.
        """
        if "://" in self.where:
            return await asyncio.to_thread(self._ask, self.where, self.token or "")
        if ":" in self.where:
            return Endpoints(addresses_of(self.where), _secret(self.secret))
        return await asyncio.to_thread(self._look_up)

    def _look_up(self) -> Endpoints:
        entry = Registry(self.registry).find(self.where)
        if entry is None:
            raise NoFlowError(
                f"no job {self.where!r} runs on this machine: start it, or say where its workers are (host:port)"
            )
        try:
            return self._ask(entry.url, entry.token)
        except TokenError as error:  # the entry is of a job that has ended: try again later
            raise NoFlowError(str(error)) from error

    def _ask(self, url: str, token: str) -> Endpoints:
        request = urllib.request.Request(
            f"{url.rstrip('/')}/connectors", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=LOOKUP_TIMEOUT_S) as answer:
                sources = json.load(answer)["sources"]
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise TokenError(f"{url} does not accept this token") from error
            raise NoFlowError(f"{url} answers {error.code}: {error.reason}") from error
        except (OSError, ValueError, KeyError, TypeError, HTTPException) as error:
            raise NoFlowError(f"nobody answers at {url}: {error}") from error
        by_name = {description["name"]: description for description in sources.values()}
        if not by_name:
            raise SourceError(f"{self.where} has no source that programs push to: Connectors(...)")
        if self.source is None and len(by_name) > 1:
            raise SourceError(f"{self.where} has several sources, say which: {', '.join(by_name)}")
        name = self.source if self.source is not None else next(iter(by_name))
        if name not in by_name:
            raise SourceError(f"{self.where} has no source {name!r}, but {', '.join(by_name)}")
        description = by_name[name]
        if not description["workers"]:
            raise NoFlowError(f"{self.where} starts: no worker listens yet")
        return Endpoints(
            addresses_of(",".join(description["workers"])), bytes.fromhex(description["secret"])
        )


def addresses_of(text: str) -> tuple[tuple[str, int], ...]:
    """Parse addresses: `host:port`, separated by commas; brackets around an IPv6 address are optional.

    Raises `FeedError` for anything else.

    >>> addresses_of("10.0.0.7:7300, [::1]:7301")
    (('10.0.0.7', 7300), ('::1', 7301))
    """
    addresses = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        if not port.isdigit() or not host or not 0 < int(port) < 1 << 16:
            raise FeedError(f"{part!r} is no address: host:port")
        addresses.append((host, int(port)))
    return tuple(addresses)


def _secret(secret: bytes | str | None) -> bytes:
    secret = secret if secret is not None else os.environ.get("RAILGUN_SECRET")
    if secret is None:
        raise FeedError(
            "the secret of the source is needed: secret=..., or RAILGUN_SECRET, in hexadecimal digits"
        )
    try:
        return bytes.fromhex(secret) if isinstance(secret, str) else secret
    except ValueError as error:
        raise FeedError(f"a secret is hexadecimal: {error}") from error
