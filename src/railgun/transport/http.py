"""What the HTTP APIs of nodes and of jobs have in common: a port of their own, a token, JSON."""

from __future__ import annotations

import asyncio
import hmac
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from railgun.transport.listener import BACKLOG, stop_accepting

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpPort:
    """An application that listens, in the event loop that starts it."""

    def __init__(
        self, app: web.Application, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self.host, self.port = host, port
        self._tls = tls
        self._listening: asyncio.Server | None = None
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=1.0
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self._tls else ''}://{host}:{self.port}"

    async def open(self) -> None:
        """Listen; `OSError` if that cannot be."""
        await self._runner.setup()
        try:
            assert self._runner.server is not None
            self._listening = await asyncio.get_running_loop().create_server(
                self._runner.server, self.host, self.port, ssl=self._tls, backlog=BACKLOG
            )
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = self._listening.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Answer what was asked, and end."""
        if self._listening is not None:
            await stop_accepting(
                [self._listening]
            )  # before it is asked which connections there are
        await self._runner.cleanup()
        await asyncio.sleep(0)  # closed sockets are let go of in the next turn


def bears(request: web.Request, token: bytes, any_case: bool = False) -> bool:
    """Whether this token came with a request (`Authorization: Bearer …`); `any_case`: also in capital letters."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    told = given.strip().encode(errors="replace")
    same = hmac.compare_digest(told.lower() if any_case else told, token)
    return scheme.lower() == "bearer" and same


def answer(
    data: Any, status: int = 200, default: Callable[[Any], Any] | None = None
) -> web.Response:
    """An answer as a line of JSON; `default`: what to make of what is not JSON."""
    text = json.dumps(data, default=default) + "\n"
    return web.Response(text=text, status=status, content_type="application/json")


def refusal(status: int, **error: str) -> web.Response:
    """What is wrong with a request."""
    made = answer({"error": error}, status)
    if status == 401:
        made.headers["WWW-Authenticate"] = "Bearer"
    return made


def figures(text: str) -> web.Response:
    """Figures, as Prometheus wants them."""
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return web.Response(body=text.encode(), headers={"Content-Type": kind})
