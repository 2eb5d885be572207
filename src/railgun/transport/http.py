"""Serve HTTP on a port of its own, check tokens, and answer with JSON: shared by the APIs of nodes and of jobs."""

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
    """An aiohttp application with its listening port, in the event loop that calls `open`."""

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
        """The URL of the port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self._tls else ''}://{host}:{self.port}"

    async def open(self) -> None:
        """Listen; raise `OSError` if the address cannot be used."""
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
        """Answer the requests under way, and close the port and its connections."""
        if self._listening is not None:
            # Before `cleanup` lists the connections, so that it misses none.
            await stop_accepting([self._listening])
        await self._runner.cleanup()
        await asyncio.sleep(0)  # sockets are closed in the next turn of the loop


def bears(request: web.Request, token: bytes, any_case: bool = False) -> bool:
    """Return whether a request has this token (`Authorization: Bearer …`); `any_case`: also in capital letters."""
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    offered = credentials.strip().encode(errors="replace")
    same = hmac.compare_digest(offered.lower() if any_case else offered, token)
    return scheme.lower() == "bearer" and same


def answer(
    data: Any, status: int = 200, default: Callable[[Any], Any] | None = None
) -> web.Response:
    """Return a response with `data` as a line of JSON; `default` converts values that JSON cannot express."""
    text = json.dumps(data, default=default) + "\n"
    return web.Response(text=text, status=status, content_type="application/json")


def refusal(status: int, **error: str) -> web.Response:
    """Return a response that refuses a request: `{"error": {…}}`."""
    response = answer({"error": error}, status)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def figures(text: str) -> web.Response:
    """Return a response with metrics in the text format of Prometheus."""
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return web.Response(body=text.encode(), headers={"Content-Type": kind})
