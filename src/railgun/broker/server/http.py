"""The HTTP API of a node: the admin calls, figures and health, on a port of its own.

    GET /streams   and all other calls of `broker.streams.admin`      GET /health         200, or 503 with the reasons
    GET /metrics   figures for Prometheus                   GET /openapi.json   all of this, for programs

Rules:

1. Whoever has not the node's secret (`Authorization: Bearer`, and its hexadecimal digits) gets 401, and nothing but
   `/health` and `/openapi.json`. With a certificate it speaks TLS, as the node does.
2. What a client gets wrong is answered with 4xx and `{"error": {"code", "message"}}`; the codes are those of the wire.
   Nothing a client sends ends the node: what nobody has thought of is answered with 500.
3. The answer to a call is what the wire tells, as JSON, and comes when it is done.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from railgun.broker.errors import BadRequestError, PortTakenError
from railgun.broker.server import openapi
from railgun.broker.server.metrics import prometheus
from railgun.broker.streams import admin
from railgun.errors import RailgunError
from railgun.transport.commands import VERSION
from railgun.transport.http import Handler, HttpPort, answer, bears, figures, refusal

if TYPE_CHECKING:
    from railgun.broker.server.server import Server

LARGEST: Final = 256 << 10  # bytes of a request
OPEN: Final = ("/health", "/openapi.json")
STATUS: Final = {
    "NO_STREAM": 404, "NO_GROUP": 404, "DIFFERS": 409, "GROUP_BUSY": 409, "GROUP_KIND": 409,
    "NOT_PERSISTENT": 409, "NO_SPACE": 507, "STORAGE": 500, "LOG_FAILED": 500, "LOG_DAMAGED": 500, "LATER_VERSION": 500,
    "ID_POOL_FULL": 503, "CLOSED": 503, "NO_MASTER": 503, "NOT_ENOUGH_REPLICAS": 503, "DEPOSED": 503, "INTERNAL": 500,
    "NO_CLUSTER": 409, "NO_NODE": 404, "UNKNOWN_NODE": 404, "NO_REGION": 404, "STILL_IN_USE": 409, "NOT_ELIGIBLE": 409,
    "IS_MEMBER": 409, "STALE": 409, "NO_LEADER": 503, "UNREACHABLE": 503,
}  # fmt: skip
"""By code; what is not named here is a bad request."""
_LOG: Final = logging.getLogger(__name__)


class Api(HttpPort):
    """Serves one node, in its event loop."""

    def __init__(self, server: Server, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._server = server
        self._token = server.secret.hex().encode()
        self._document = openapi.document(str(VERSION))
        app = web.Application(middlewares=[self._guarded], client_max_size=LARGEST)
        for call in admin.CALLS.values():
            path = call.path.replace("{producer}", "{producer:.+}")  # their names may have slashes
            app.router.add_route(call.method, path, partial(self._call, call))
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/openapi.json", self._openapi)
        super().__init__(app, host, port, tls)

    async def start(self) -> None:
        """Listen; raises `PortTakenError` if that cannot be."""
        try:
            await self.open()
        except OSError as error:
            raise PortTakenError(
                f"the HTTP API cannot listen on {self.host}:{self.port}: {error.strerror or error}. Give it "
                "another port (--http-port; 0: any, none: no HTTP)"
            ) from error

    # ------------------------------------------------------------ around all requests

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path not in OPEN and not bears(request, self._token, any_case=True):
                told = "this needs the node's secret: Authorization: Bearer, and its hexadecimal digits"
                return _refusal(401, "UNAUTHORIZED", told)
            return await handler(request)
        except RailgunError as error:
            code = str(getattr(error, "code", "BAD_REQUEST"))
            return _refusal(STATUS.get(code, 400), code, str(error))
        except web.HTTPException as error:
            return _refusal(error.status, *_in_words(error, request))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            _LOG.exception("a request has failed in a way nobody has thought of")
            return _refusal(500, "INTERNAL", f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------ answers

    async def _call(self, call: admin.Call, request: web.Request) -> web.Response:
        given: dict[str, Any] = dict(request.match_info)
        in_query = call.method in ("GET", "DELETE")
        more = _query(call, request) if in_query else admin.arguments_of(await request.read())
        twice = given.keys() & more.keys()
        if twice:
            raise BadRequestError(f"{min(twice)} is in the path already")
        node = self._server.node
        done = node.spawn(self._done(call, given | more))
        return answer(await asyncio.shield(done))  # what was begun is not left half done

    async def _done(self, call: admin.Call, given: dict[str, Any]) -> Any:
        """By this node, or by the master of the stream, if that is another one."""
        node = self._server.node
        if node.cluster is not None and call.name in admin.OF_MASTER:
            found, told = await node.cluster.elsewhere(call.name, call.checked(given))
            if found:
                return told
        return await admin.call(node, call.name, given)

    async def _metrics(self, request: web.Request) -> web.Response:
        return figures(prometheus(self._server.node, len(self._server.sessions)))

    async def _health(self, request: web.Request) -> web.Response:
        node = self._server.node
        reasons = node.reasons()
        alarms = [{"code": one["code"], "text": one["text"]} for one in node.alarms()]
        told = {"healthy": not reasons, "reasons": reasons, "alarms": alarms}
        return answer(told, 503 if reasons else 200)

    async def _openapi(self, request: web.Request) -> web.Response:
        return answer(self._document)


def _query(call: admin.Call, request: web.Request) -> dict[str, Any]:
    kinds = {argument.name: argument.kind for argument in call.arguments}
    found: dict[str, Any] = {}
    for name, text in request.query.items():
        if name in found:
            raise BadRequestError(f"{name[:80]} is given twice")
        found[name] = kinds[name].typed(text) if name in kinds else text
    return found


def _in_words(error: web.HTTPException, request: web.Request) -> tuple[str, str]:
    match error.status:
        case 404:
            return "NOT_FOUND", f"there is nothing at {request.path[:200]}"
        case 405:
            return "BAD_METHOD", f"{request.path[:200]} does not answer to {request.method}"
        case 413:
            return "TOO_LARGE", f"a request has at most {LARGEST} bytes"
    return "BAD_REQUEST", error.reason


def _refusal(status: int, code: str, message: str) -> web.Response:
    return refusal(status, code=code, message=message)
