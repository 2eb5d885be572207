"""Send questions by HTTP to one of several servers that know the same.

Rules:

1. Servers are asked in turn, beginning with the one that answered last, until one answers; each gets its share of the
   time. A server that cannot be reached, fails (5xx), or answers nonsense has not answered.
2. A refusal (4xx) is an answer: the other servers would refuse, too.
3. An answer is read up to `MAX_ANSWER_BYTES`. Redirections are not followed: they could carry secrets away.
4. Each question has a connection of its own. Questions are few, and no connection can be found dead that way.
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

MAX_ANSWER_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a server. `data` is its JSON, or None."""

    status: int
    text: str
    data: Any
    headers: Mapping[str, str]


class _NoAnswerError(Exception):
    """A server has not given a usable answer."""


class Servers:
    """Servers that know the same, asked in turn."""

    def __init__(self, place: Place, addresses: Sequence[Address], timeout: float) -> None:
        self._place, self._addresses = place, list(addresses)
        self._each = timeout / len(addresses)
        self._first = 0
        tls, ca = place.flag("tls"), place.options.get("ca")
        if ca is not None and not tls:
            raise place.bad("ca (certificates to trust) needs tls=true")
        self._tls: ssl.SSLContext | bool = True
        self._scheme = "https" if tls else "http"
        if ca is not None:
            try:
                self._tls = ssl.create_default_context(cafile=ca)
            except OSError as error:  # also raised for invalid certificates
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
        """Ask servers until one answers. `json_only`: a success without JSON is no answer. Raise `DiscoveryError` if
        none answers."""
        errors: list[str] = []
        count = len(self._addresses)
        for number in [(self._first + i) % count for i in range(count)]:
            host, port = self._addresses[number]
            shown_host = f"[{host}]" if ":" in host else host
            try:
                async with asyncio.timeout(self._each):
                    url = f"{self._scheme}://{shown_host}:{port}{path}"
                    answer = await self._ask_one(method, url, body, headers or {}, json_only)
            except TimeoutError:
                errors.append(f"{shown_host}:{port}: no answer within {self._each:.3g} s")
            except _NoAnswerError as error:
                errors.append(f"{shown_host}:{port}: {error}")
            except (aiohttp.ClientError, OSError, ValueError) as error:
                error_text = str(error).strip() or type(error).__name__
                errors.append(f"{shown_host}:{port}: {error_text[:200]}")
            else:
                self._first = number
                return answer
        error_list = "; ".join(errors)
        raise self._place.failed(
            f"no server answers ({error_list}). Is it running, and reachable from here?"
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
            received = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                received += chunk
                if len(received) > MAX_ANSWER_BYTES:
                    raise _NoAnswerError(f"its answer is longer than {MAX_ANSWER_BYTES:,} bytes")
            text = received.decode("utf-8", "replace")
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
