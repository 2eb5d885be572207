"""Serve a node's HTTP API on a port of its own: admin calls, metrics and health.

    GET /streams   and all other calls of `broker.streams.admin`      GET /health         200, or 503 with the reasons
    GET /metrics   metrics for Prometheus                             GET /openapi.json   this API as OpenAPI document

Rules:

1. A request without the node's secret (`Authorization: Bearer` and the secret in hexadecimal digits) gets 401, except
   for `/health` and `/openapi.json`. With a certificate the API speaks TLS, as the node does.
2. A client's mistake is answered with 4xx and `{"error": {"code", "message"}}`; the codes are those of the wire
   protocol. No request ends the node: an unexpected exception is answered with 500.
3. The response to a call is the wire protocol's answer as JSON, sent when the call is done.
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

MAX_REQUEST_BYTES: Final = 256 << 10
OPEN_PATHS: Final = ("/health", "/openapi.json")
STATUS: Final = {
    "NO_STREAM": 404, "NO_GROUP": 404, "DIFFERS": 409, "GROUP_BUSY": 409, "GROUP_KIND": 409,
    "NOT_PERSISTENT": 409, "NO_SPACE": 507, "STORAGE": 500, "LOG_FAILED": 500, "LOG_DAMAGED": 500, "LATER_VERSION": 500,
    "ID_POOL_FULL": 503, "CLOSED": 503, "NO_MASTER": 503, "NOT_ENOUGH_REPLICAS": 503, "DEPOSED": 503, "INTERNAL": 500,
    "NO_CLUSTER": 409, "NO_NODE": 404, "UNKNOWN_NODE": 404, "NO_REGION": 404, "STILL_IN_USE": 409, "NOT_ELIGIBLE": 409,
    "IS_MEMBER": 409, "STALE": 409, "NO_LEADER": 503, "UNREACHABLE": 503,
}  # fmt: skip
"""The HTTP status of an error code. A code that is not listed here is a bad request."""
_LOG: Final = logging.getLogger(__name__)


class Api(HttpPort):
    """The HTTP API of one node, in the node's event loop."""

    def __init__(self, server: Server, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._server = server
        self._token = server.secret.hex().encode()
        self._document = openapi.document(str(VERSION))
        app = web.Application(middlewares=[self._guarded], client_max_size=MAX_REQUEST_BYTES)
        for call in admin.CALLS.values():
            path = call.path.replace("{producer}", "{producer:.+}")  # their names may have slashes
            app.router.add_route(call.method, path, partial(self._call, call))
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/openapi.json", self._openapi)
        super().__init__(app, host, port, tls)

    async def start(self) -> None:
        """Listen. Raise `PortTakenError` if the address cannot be bound."""
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
            if request.path not in OPEN_PATHS and not bears(request, self._token, any_case=True):
                error_text = "give the node's secret in hexadecimal digits: Authorization: Bearer …"
                return _refusal(401, "UNAUTHORIZED", error_text)
            return await handler(request)
        except RailgunError as error:
            code = str(getattr(error, "code", "BAD_REQUEST"))
            return _refusal(STATUS.get(code, 400), code, str(error))
        except web.HTTPException as error:
            return _refusal(error.status, *_explain(error, request))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            _LOG.exception("a request failed unexpectedly")
            return _refusal(500, "INTERNAL", f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------ answers

    async def _call(self, call: admin.Call, request: web.Request) -> web.Response:
        arguments: dict[str, Any] = dict(request.match_info)
        in_query = call.method in ("GET", "DELETE")
        rest = _query(call, request) if in_query else admin.arguments_of(await request.read())
        repeated = arguments.keys() & rest.keys()
        if repeated:
            raise BadRequestError(f"{min(repeated)} is already given in the path")
        node = self._server.node
        task = node.spawn(self._done(call, arguments | rest))
        return answer(await asyncio.shield(task))  # finish the call even if the client disconnects

    async def _done(self, call: admin.Call, arguments: dict[str, Any]) -> Any:
        """Run the call on this node, or on the stream's master if that is another node."""
        node = self._server.node
        if node.cluster is not None and call.name in admin.OF_MASTER:
            answered, result = await node.cluster.elsewhere(call.name, call.checked(arguments))
            if answered:
                return result
        return await admin.call(node, call.name, arguments)

    async def _metrics(self, request: web.Request) -> web.Response:
        return figures(prometheus(self._server.node, len(self._server.sessions)))

    async def _health(self, request: web.Request) -> web.Response:
        node = self._server.node
        reasons = node.reasons()
        alarms = [{"code": alarm["code"], "text": alarm["text"]} for alarm in node.alarms()]
        status = {"healthy": not reasons, "reasons": reasons, "alarms": alarms}
        return answer(status, 503 if reasons else 200)

    async def _openapi(self, request: web.Request) -> web.Response:
        return answer(self._document)


def _query(call: admin.Call, request: web.Request) -> dict[str, Any]:
    kinds = {argument.name: argument.kind for argument in call.arguments}
    values: dict[str, Any] = {}
    for name, text in request.query.items():
        if name in values:
            raise BadRequestError(f"{name[:80]} is given twice")
        values[name] = kinds[name].typed(text) if name in kinds else text
    return values


def _explain(error: web.HTTPException, request: web.Request) -> tuple[str, str]:
    match error.status:
        case 404:
            return "NOT_FOUND", f"there is nothing at {request.path[:200]}"
        case 405:
            return "BAD_METHOD", f"{request.path[:200]} does not answer to {request.method}"
        case 413:
            return "TOO_LARGE", f"a request has at most {MAX_REQUEST_BYTES} bytes"
    return "BAD_REQUEST", error.reason


def _refusal(status: int, code: str, message: str) -> web.Response:
    return refusal(status, code=code, message=message)
