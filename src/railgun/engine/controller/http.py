"""Serve the controller's HTTP API: JSON, on loopback, protected by a token, in the controller's event loop.

    GET  /status    the status of the job                 POST /scale     {"workers": 4}
    GET  /events    events, as server-sent events         POST /pin       {"key": "ada", "worker": 2}
    GET  /metrics   metrics for Prometheus                POST /snapshot  take one now
    GET  /health    200, or 503 if the flow failed        POST /stop      {"drain": true}, or nothing
    GET  /snapshots committed and failed snapshots        POST /abort     end at once
    GET  /connectors  where programs push records to, and the secrets they need
    GET  /state     ?step=, &key= as JSON or text: the state of a key; without a key, the number of keys

Rules:

1. A request without the job's token (`Authorization: Bearer …`) gets 401, and nothing else.
2. Errors of the client are answered with 4xx and `{"error": {"kind", "message"}}`. No request can end the controller:
   an unexpected error is answered with 500, and the flow goes on.
3. A POST is answered when the request is accepted, not when it is done: `last_event` in the answer is the number of the
   last event before it, so its consequences are the events after that.
4. `/events` sends past events after `Last-Event-ID` or `?after=`, then new ones, and about four times a second a
   `status`; `end` is the last. A client that does not read is dropped: nothing waits for it, and nothing piles up.
5. `/state` asks workers, which answer between two batches; `/snapshots` asks the store. Neither holds up the
   controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web

from railgun.engine.controller.controller import Controller, Event, ListenError, WorkersError
from railgun.engine.controller.metrics import prometheus
from railgun.engine.controller.state_queries import (
    BusyError,
    NoAnswerError,
    NoKeyError,
    NoStepError,
    key_in,
    key_typed,
)
from railgun.engine.protocol.lifecycle.machine import LifecycleError
from railgun.engine.snapshots.plain import from_json
from railgun.errors import KeyTypeError, RailgunError
from railgun.transport.http import Handler, HttpPort, answer, bears, figures, refusal

STATUS_EVERY_S: Final = 0.25
MAX_LISTENERS: Final = 64
MAX_EVENTS_BEHIND: Final = 1_000  # that a listener has not received yet
WRITE_TIMEOUT_S: Final = 5.0  # for a listener to read what was sent
MAX_REQUEST_BYTES: Final = 64 << 10


class RequestError(RailgunError):
    """A request is invalid, or comes at the wrong time."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Api(HttpPort):
    """The HTTP API of one controller. Its coroutines run in the controller's loop."""

    def __init__(
        self, controller: Controller, token: str, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.controller = controller
        self.token = token
        self._listeners: set[asyncio.Queue[Event | None]] = set()
        app = web.Application(middlewares=[self._guarded], client_max_size=MAX_REQUEST_BYTES)
        app.router.add_get("/status", self._status)
        app.router.add_get("/events", self._events)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/snapshots", self._snapshots)
        app.router.add_get("/state", self._state)
        app.router.add_get("/connectors", self._connectors)
        app.router.add_post("/scale", self._scale)
        app.router.add_post("/pin", self._pin)
        app.router.add_post("/snapshot", self._snapshot)
        app.router.add_post("/stop", self._stop)
        app.router.add_post("/abort", self._abort)
        super().__init__(app, host, port)

    async def start(self) -> None:
        """Listen for requests. Raises `ListenError` if the port cannot be opened."""
        try:
            await self.open()
        except OSError as error:
            raise ListenError(
                f"the HTTP API cannot listen at {self.host}:{self.port}: {error.strerror}. "
                "Give another port, or 0 for one that is free."
            ) from error
        self.controller.watch(self._queue_event)

    async def close(self) -> None:
        """Send listeners the remaining events, and close all connections."""
        for queue in self._listeners:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)
        await super().close()

    # ------------------------------------------------------------ around all requests

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_token(request)
            return await handler(request)
        except RequestError as error:
            return _refusal(error.status, error.kind, str(error))
        except web.HTTPException as error:
            return _refusal(error.status, *_describe(error, request))
        except (WorkersError, KeyTypeError) as error:
            return _refusal(400, "bad-request", str(error))
        except LifecycleError as error:
            return _refusal(409, "wrong-state", str(error))
        except NoStepError as error:
            return _refusal(404, "no-step", str(error))
        except NoKeyError as error:
            return _refusal(404, "no-key", str(error))
        except BusyError as error:
            return _refusal(503, "busy", str(error))
        except NoAnswerError as error:
            return _refusal(504, "no-answer", str(error))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            return _refusal(500, "internal", f"{type(error).__name__}: {error}")

    def _check_token(self, request: web.Request) -> None:
        if not bears(request, self.token.encode()):
            raise RequestError(
                401, "unauthorized", "this needs the job's token: Authorization: Bearer …"
            )

    # ------------------------------------------------------------ GET requests

    async def _status(self, request: web.Request) -> web.Response:
        return _answer(self.controller.status())

    async def _health(self, request: web.Request) -> web.Response:
        failed = self.controller.lifecycle.state == "failed"
        return _answer({"state": self.controller.shown}, 503 if failed else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return figures(prometheus(self.controller.status(), self.controller.totals))

    async def _snapshots(self, request: web.Request) -> web.Response:
        attempts = await asyncio.wrap_future(self.controller.attempts())
        return _answer({"snapshots": attempts})

    async def _connectors(self, request: web.Request) -> web.Response:
        return _answer({"sources": self.controller.doors()})

    async def _state(self, request: web.Request) -> web.Response:
        inquiries = self.controller.inquiries
        step, key_text = request.query.get("step"), request.query.get("key")
        if step is None:
            steps = ", ".join(map(repr, inquiries.steps))
            raise RequestError(
                400,
                "bad-request",
                f"the parameter step is missing; these steps have state: {steps}",
            )
        if key_text is None:
            answers = await inquiries.overview(step)
            workers = [
                {
                    "worker": answer.worker,
                    "keys": answer.keys,
                    "samples": [_value(*s) for s in answer.samples],
                }
                for answer in answers
            ]
            return _answer(
                {"step": step, "keys": sum(answer.keys for answer in answers), "workers": workers}
            )
        try:
            key = key_typed(key_text)
        except RecursionError as error:
            raise RequestError(400, "bad-request", "the key is nested too deeply") from error
        saved = await inquiries.key(step, key)
        state = {"state" if saved.is_json else "repr": _value(saved.text, saved.is_json)}
        details = {"timers": list(saved.timers), "ended": saved.ended}
        return _answer({"step": step, "key": key, "worker": saved.worker, **state, **details})

    # ------------------------------------------------------------ POST requests

    async def _scale(self, request: web.Request) -> web.Response:
        body = await _body(request, "workers")
        return self._accept(lambda: self.controller.scale(body["workers"]))

    async def _pin(self, request: web.Request) -> web.Response:
        body = await _body(request, "key", "worker")
        worker = body["worker"]
        if isinstance(worker, bool) or not isinstance(worker, int):
            raise RequestError(400, "bad-request", f"a worker is a whole number, not {worker!r}")
        return self._accept(lambda: self.controller.pin(key_in(body["key"]), worker))

    async def _stop(self, request: web.Request) -> web.Response:
        body = await _body(request) if request.can_read_body else {}
        drain = body.get("drain", False)
        if not isinstance(drain, bool):
            raise RequestError(400, "bad-request", f"drain is true or false, not {drain!r}")
        self._check_not_over("stopped")
        life = self.controller.lifecycle
        return self._accept(lambda: self.controller.stop(drain=drain), lambda: {"how": life.how})

    async def _snapshot(self, request: web.Request) -> web.Response:
        last_event = self.controller.last_event
        before = self.controller.snapshot()
        body = {"after": before, "last_event": last_event, "status": self.controller.status()}
        return _answer(body, 202)

    async def _abort(self, request: web.Request) -> web.Response:
        self._check_not_over("aborted")
        return self._accept(lambda: self.controller.abort("aborted by request"))

    def _check_not_over(self, action: str) -> None:
        life = self.controller.lifecycle
        if life.over:
            raise LifecycleError(f"the flow is {life.state_text}: it cannot be {action}")

    def _accept(
        self, order: Callable[[], None], more: Callable[[], dict[str, Any]] = dict
    ) -> web.Response:
        before = self.controller.status()["last_event"]
        order()
        body = {"last_event": before, "status": self.controller.status(), **more()}
        return _answer(body, 202)

    # ------------------------------------------------------------ events

    def _queue_event(self, event: Event) -> None:
        for queue in list(self._listeners):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._listeners.discard(queue)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        after = _number(request)
        if len(self._listeners) >= MAX_LISTENERS:
            raise RequestError(503, "busy", f"there are {MAX_LISTENERS} listeners already")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        response.force_close()
        queue: asyncio.Queue[Event | None] = asyncio.Queue(MAX_EVENTS_BEHIND)
        past_events = self.controller.events(after)
        self._listeners.add(queue)
        try:
            await response.prepare(request)
            # Without this limit a listener that does not read would be noticed only after megabytes.
            if request.transport is not None:
                request.transport.set_write_buffer_limits(high=MAX_REQUEST_BYTES)
            for event in past_events:
                await _write(response, _event(event))
            await self._follow(response, queue)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._listeners.discard(queue)
        return response

    async def _follow(
        self, response: web.StreamResponse, queue: asyncio.Queue[Event | None]
    ) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while queue in self._listeners:
            try:
                async with asyncio.timeout_at(due):
                    event = await queue.get()
            except TimeoutError:
                if not queue.empty():
                    continue  # a status never overtakes the events that led to it
                due = loop.time() + STATUS_EVERY_S
                await _write(response, _sse("status", self.controller.status()))
                if not self.controller.over or not queue.empty():
                    continue
                event = None
            if event is None:
                await _write(response, _sse("end", self.controller.status()))
                return
            await _write(response, _event(event))


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await response.write(data)


def _event(event: Event) -> bytes:
    return f"id: {event.number}\n".encode() + _sse("happened", asdict(event))


def _sse(kind: str, data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data, default=str)}\n\n".encode()


def _number(request: web.Request) -> int:
    """Return the number of the event after which a listener wants events."""
    text = request.query.get("after") or request.headers.get("Last-Event-ID") or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise RequestError(400, "bad-request", f"an event's number is expected, not {text!r}")
    return int(text)


def _value(text: str, is_json: bool) -> Any:
    return from_json([text])[0] if is_json else text


async def _body(request: web.Request, *fields: str) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "bad-json", f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(400, "bad-request", "the request must be a JSON object")
    missing = [field for field in fields if field not in body]
    if missing:
        raise RequestError(400, "bad-request", f"the request has no {missing[0]!r}")
    return body


def _describe(error: web.HTTPException, request: web.Request) -> tuple[str, str]:
    match error.status:
        case 404:
            return "not-found", f"there is nothing at {request.path}"
        case 405:
            return "method", f"{request.path} does not answer to {request.method}"
        case 413:
            return "too-large", f"a request has at most {MAX_REQUEST_BYTES} bytes"
    return "http", error.reason


def _answer(data: Any, status: int = 200) -> web.Response:
    return answer(data, status, default=str)


def _refusal(status: int, kind: str, message: str) -> web.Response:
    return refusal(status, kind=kind, message=message)
