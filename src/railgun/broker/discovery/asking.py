"""Questions by HTTP, to one of several servers that know the same.

Rules:

1. Servers are asked in turn, beginning with the one that answered last, until one answers; each gets its share of the
   time. One that cannot be reached, says that it cannot (5xx), or talks nonsense, has not answered.
2. An answer that refuses (4xx) is an answer: others would say the same.
3. An answer is read up to `LONGEST` bytes. Redirections are not followed: they could carry secrets away.
4. Each question has a connection of its own. There are few, and so none is found dead that an earlier one has left.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from railgun.broker.discovery.plugin import Address, Place

LONGEST: Final = 4 << 20  # bytes of an answer


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said. `data` is its JSON, or None."""

    status: int
    text: str
    data: Any
    headers: Mapping[str, str]


class _NoAnswerError(Exception):
    """Why a server has not answered."""


class Servers:
    """Those who know."""

    def __init__(self, place: Place, addresses: Sequence[Address], timeout: float) -> None:
        self._place, self._addresses = place, list(addresses)
        self._each = timeout / len(addresses)
        self._first = 0
        tls, ca = place.flag("tls"), place.options.get("ca")
        if ca is not None and not tls:
            raise place.bad("ca is what a certificate is checked with: it goes with tls=true")
        self._tls: ssl.SSLContext | bool = True
        self._scheme = "https" if tls else "http"
        if ca is not None:
            try:
                self._tls = ssl.create_default_context(cafile=ca)
            except OSError as error:  # also what is wrong within it
                why = f"the certificates in {ca} cannot be used: {error.strerror or error}"
                raise place.bad(why) from error

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        json_only: bool = True,
    ) -> Answer:
        """Ask until one answers; `DiscoveryError` if none does. `json_only`: any other success is none."""
        failed: list[str] = []
        count = len(self._addresses)
        for number in [(self._first + i) % count for i in range(count)]:
            host, port = self._addresses[number]
            shown = f"[{host}]" if ":" in host else host
            try:
                async with asyncio.timeout(self._each):
                    url = f"{self._scheme}://{shown}:{port}{path}"
                    answer = await self._ask_one(method, url, body, headers or {}, json_only)
            except TimeoutError:
                failed.append(f"{shown}:{port}: no answer within {self._each:.3g} s")
            except _NoAnswerError as error:
                failed.append(f"{shown}:{port}: {error}")
            except (aiohttp.ClientError, OSError, ValueError) as error:
                said = str(error).strip() or type(error).__name__
                failed.append(f"{shown}:{port}: {said[:200]}")
            else:
                self._first = number
                return answer
        told = "; ".join(failed)
        raise self._place.failed(
            f"nobody answers ({told}). Is it running, and reachable from here?"
        )

    async def _ask_one(
        self, method: str, url: str, body: Any, headers: Mapping[str, str], json_only: bool
    ) -> Answer:
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                *(method, url),
                json=body,
                headers=headers,
                allow_redirects=False,
                ssl=self._tls,
            ) as response,
        ):
            said = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                said += chunk
                if len(said) > LONGEST:
                    raise _NoAnswerError(f"its answer is longer than {LONGEST:,} bytes")
            text = said.decode("utf-8", "replace")
            data = _read(text)
            if response.status >= 500 or 300 <= response.status < 400:
                raise _NoAnswerError(f"it says {response.status} {_short(text)}".strip())
            if json_only and response.status < 300 and data is None:
                raise _NoAnswerError(f"its answer is no JSON: {text[:60]!r}")
            return Answer(response.status, _short(text), data, response.headers)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _short(text: str) -> str:
    return " ".join(text.split())[:200]
