"""Push HTTP requests (webhooks) into a flow. A POST is a message.

    POST /STREAM        the body is the message; the header X-Message-Id may hold its id
    POST /STREAM/ID     the id in the path
    GET  /health        200, or 503 while there is no connection to the flow

Rules:

1. The answer is 200 when the message is in a committed snapshot of the flow, and no earlier: the caller may then forget
   the message. With `?wait=no`, or `early`, the answer is 202 as soon as the message is handed over; it is lost if this
   program ends before the flow has it.
2. Ids are whole numbers from 0 on that increase within a stream. A caller that gives ids can send a message again, and
   it is accepted once: `{"duplicate": true}`. A message without an id gets the next one; sent again, it is another
   message. Callers cannot give the very last ids, so that there always is a next one.
3. An id at or below the flow's position counts as a duplicate, for this program cannot know what was sent before it
   started. An id that is known not to have come (lower than ids that wait, or came lately) is answered with 409.
4. Nothing grows without bounds: the size of a body is limited (413), and so is the total size of the messages that wait
   for the flow (503, with Retry-After). Of too many streams, the least recently used one is closed.
5. A message that the flow refuses is answered with 422, and the stream continues without it.
6. When this program stops, it accepts nothing more. Requests that wait are answered when their message is acknowledged,
   or after a timeout with 503.
7. A stream is for one program at a time. An id is assigned only while the stream is open here, behind the flow's
   position at that time. If the flow has more of a stream than was sent from here, others send it too, and it is
   unknown which messages from here it has: no request is answered with 200 then.
8. An error of a request or a stream is answered to the requests concerned. This program ends only when nothing can be
   sent any more, or when the flow has lost messages that it had acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import OrderedDict
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from aiohttp import web
from aiohttp.http import HttpProcessingError

from railgun.engine.protocol.ingest.messages import LAST_ID, NONE
from railgun.ingest.client import Connector
from railgun.ingest.errors import FeedError, RefusedError, RewindError, TooLargeError
from railgun.ingest.ready.progress import Progress
from railgun.ingest.stream import check_name
from railgun.transport.http import Handler, HttpPort, answer, bears, refusal
from railgun.transport.listen_rules import is_loopback

PORT: Final = 7180
MAX_BODY_BYTES: Final = 512 << 10
MAX_WAITING_BYTES: Final = 64 << 20  # of messages that wait for the flow
REQUEST_TIMEOUT_S: Final = 30.0  # for the body, and for the acknowledgement
REMEMBERED_IDS: Final = 1_000  # acknowledged or refused ids remembered for each stream
MAX_STREAMS: Final = 10_000
MAX_GIVEN_ID: Final = LAST_ID - (1 << 32)  # the highest id that a caller may give
MESSAGE_OVERHEAD_BYTES: Final = 200  # of memory that a message takes, besides its body
POSITION_POLL_S: Final = 0.5  # between two checks of the flow's position, at the start of a stream
ID_HEADER: Final = "X-Message-Id"
_LOG: Final = logging.getLogger(__name__)
R = TypeVar("R")


class ListenError(FeedError):
    """Webhooks cannot be received at this address."""


def open_to_all(host: str) -> ListenError:
    """Return the error that refuses to listen without TLS on an address other machines can reach."""
    return ListenError(
        f"{host} can be reached from elsewhere, and what is sent there can be read: give a certificate and its key, or "
        "listen on 127.0.0.1"
    )


class _BusyError(Exception):
    """A request cannot be served now, and may be sent again later."""


class _RequestError(Exception):
    """A request is refused, with this HTTP status and code."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


class Handed(NamedTuple):
    """A message that the connector has: its waiting request, its size, and whether its id was assigned here."""

    future: asyncio.Future[None]
    size: int
    drawn: bool


@dataclass(slots=True)
class Hook:
    """A stream that receives requests. Each id up to `last` waits, is refused, has come, or is out of order."""

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: bool = False  # whether the flow's position is known
    last: int = NONE
    floor: int = NONE  # the flow has all messages up to this id that were ever sent
    waiting: OrderedDict[int, Handed] = field(default_factory=OrderedDict)
    """Messages that are handed over and not acknowledged, by id."""
    came: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Acknowledged ids above the floor."""
    refused: OrderedDict[int, tuple[int, str, str]] = field(default_factory=OrderedDict)
    """Ids that will not be in the flow, and the status, code and text that answer them."""
    watch: asyncio.Task[None] | None = None


class Webhooks(HttpPort):
    """A server that pushes the requests it receives into a flow.

    `acknowledged` must be the connector's `on_ack`, and `passed` its `on_passed`. `waiting`: the most bytes of messages
    that wait for the flow, at most half of what the connector keeps. `patience`: seconds for which a request waits.
    """

    def __init__(
        self,
        connector: Connector,
        host: str = "127.0.0.1",
        port: int = PORT,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        early: bool = False,
        largest: int = MAX_BODY_BYTES,
        waiting: int = MAX_WAITING_BYTES,
        patience: float = REQUEST_TIMEOUT_S,
        progress: Progress | None = None,
    ) -> None:
        if tls is None and not is_loopback(host):
            raise open_to_all(host)
        self.connector = connector
        self.early = early
        self.largest, self.waiting, self.patience = largest, waiting, patience
        self.progress = progress or Progress()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future that gets an exception when nothing can be sent any more."""
        self.failed.add_done_callback(_heard)
        self._token = None if token is None else token.encode()
        self._hooks: OrderedDict[str, Hook] = OrderedDict()  # least recently used first
        self._tasks: set[asyncio.Task[Any]] = set()
        self._held = 0  # bytes of messages that wait for the flow
        self._waits: set[asyncio.Timeout] = set()  # of requests whose body was read
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        app = web.Application(middlewares=[self._guarded], client_max_size=largest)
        app.router.add_get("/health", self._health)
        app.router.add_post("/{stream}", self._post)
        app.router.add_post("/{stream}/{id}", self._post)
        super().__init__(app, host, port, tls)

    async def start(self) -> None:
        """Listen; raise `ListenError` if the address cannot be used."""
        try:
            await self.open()
        except OSError as error:
            raise ListenError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror or error}"
            ) from error

    async def stop(self, patience: float) -> None:
        """Accept no more requests, answer those that wait within `patience` seconds, and close the server."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._settled()
        for waits in self._waits:
            with contextlib.suppress(RuntimeError):  # it expired just now
                waits.reschedule(0)
        for task in [*self._tasks, *(hook.watch for hook in self._hooks.values())]:
            if task is not None:
                task.cancel()
        await self.close()

    async def _settled(self) -> None:
        await self._idle.wait()
        for hook in list(self._hooks.values()):  # also messages without a waiting request
            if hook.watch is not None:
                await asyncio.wait([hook.watch])

    # ------------------------------------------------------------ around all requests

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            is_open = request.path == "/health" and request.method == "GET"
            if self._token is not None and not is_open and not bears(request, self._token):
                return refusal(401, code="UNAUTHORIZED", message="this needs the token")
            return await handler(request)
        except _BusyError as error:
            return _later("BUSY", error)
        except _RequestError as error:
            return refusal(error.status, code=error.code, message=str(error))
        except web.HTTPException as error:
            text = (
                f"a body has at most {self.largest:,} bytes"
                if error.status == 413
                else error.reason
            )
            return refusal(error.status, code=error.reason.upper().replace(" ", "_"), message=text)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except FeedError as error:
            return _later("FLOW", error)
        except Exception as error:
            _LOG.exception("a request has failed unexpectedly")
            return refusal(500, code="INTERNAL", message=f"{type(error).__name__}: {error}")

    async def _health(self, request: web.Request) -> web.Response:
        connected = self.connector.connected and not self._stopping
        return answer(
            {"connected": connected, **self.progress.figures()}, 200 if connected else 503
        )

    # ------------------------------------------------------------ messages

    async def _post(self, request: web.Request) -> web.Response:
        id_text = request.match_info.get("id", request.headers.get(ID_HEADER))
        id_ = None if id_text is None else _number(id_text)
        wait = request.query.get("wait", "no" if self.early else "ack")
        if wait not in ("ack", "no"):
            raise _RequestError(400, "BAD_REQUEST", f"wait is 'ack' or 'no', not {wait[:50]!r}")
        name = request.match_info["stream"]
        try:
            check_name(name)
        except FeedError as error:
            raise _RequestError(400, "BAD_NAME", str(error)) from error
        body = await self._body(request)
        return await self._answer(name, id_, body, wait)

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.patience):
                return await request.read()
        except TimeoutError:
            text = f"the body has not come within {self.patience:g} s"
            raise _RequestError(408, "REQUEST_TIMEOUT", text) from None
        except (HttpProcessingError, web.RequestPayloadError) as error:
            text = " ".join(str(error).split())
            raise _RequestError(400, "BAD_BODY", f"the body cannot be read: {text}") from error

    async def _answer(self, name: str, id_: int | None, body: bytes, wait: str) -> web.Response:
        if self._stopping:
            raise _BusyError("this program is stopping; send the message again")
        size = len(body) + MESSAGE_OVERHEAD_BYTES
        if self._held + size > self.waiting:
            raise _BusyError(f"{self._held:,} bytes wait for the flow; send it again later")
        waits = asyncio.timeout(self.patience)
        self._waits.add(waits)
        self._idle.clear()
        try:
            async with waits:
                self._held += size
                try:
                    taken, is_new, future = await self._hand_over(name, id_, body)
                finally:
                    self._held -= size
                if wait == "ack" and future is not None:
                    await asyncio.shield(future)
        except TimeoutError:
            when = "before the end" if self._stopping else f"within {self.patience:g} s"
            raise _BusyError(f"the flow has not acknowledged it {when}; send it again") from None
        finally:
            self._waits.discard(waits)
            if not self._waits:
                self._idle.set()
        status = 200 if wait == "ack" else 202
        return answer({"id": taken, **({} if is_new else {"duplicate": True})}, status)

    async def _hand_over(
        self, name: str, id_: int | None, body: bytes
    ) -> tuple[int, bool, asyncio.Future[None] | None]:
        """Hand a message to the connector; return its id, whether it is new, and a future of its acknowledgement."""
        hook = await self._locked(name)  # so that messages keep the order in which they came
        try:
            if id_ is None or not hook.begun:
                await self._begin(hook)
        except BaseException:
            hook.lock.release()
            raise
        # The caller may disconnect: the task still completes, and no other request gets an id before that.
        taking = self._task(self._take(hook, id_, body))
        taking.add_done_callback(lambda _: hook.lock.release())
        return await asyncio.shield(taking)

    def _task(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Return a task that continues even if the caller stops waiting for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_heard)
        return task

    async def _locked(self, name: str) -> Hook:
        """Return the hook of a stream with its lock acquired; the caller must release the lock."""
        while True:
            while (hook := self._hooks.get(name)) is None and len(self._hooks) >= MAX_STREAMS:
                await self._make_room()
            if hook is None:
                hook = self._hooks[name] = Hook(name)
            await hook.lock.acquire()
            if self._hooks.get(name) is hook:  # else it was closed meanwhile
                self._hooks.move_to_end(name)
                return hook
            hook.lock.release()

    async def _make_room(self) -> None:
        """Close the least recently used stream without waiting messages; raise `_BusyError` if there is none."""
        for hook in self._hooks.values():
            if not hook.waiting and not hook.lock.locked():
                await asyncio.shield(self._task(self._let_go(hook)))
                return
        raise _BusyError(f"at most {MAX_STREAMS:,} streams can be open at the same time")

    async def _let_go(self, hook: Hook) -> None:
        async with hook.lock:
            if hook.begun:
                with contextlib.suppress(FeedError):
                    await self.connector.end(hook.name)
                self.progress.streams -= 1
            del self._hooks[hook.name]

    async def _begin(self, hook: Hook) -> None:
        """Learn the flow's position, if it is unknown or others have sent the stream since.

        No message is accepted before that position is in a snapshot: else the flow might go back behind it.
        """
        connector = self.connector
        while True:
            try:
                at = await connector.position(hook.name)
                if hook.begun and (at is None or at <= hook.last):
                    return
                acked = connector.acked(hook.name)
                if at is None or (acked is not None and acked >= at):
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POSITION_POLL_S):
                        await connector.wait(hook.name, at)
            except RefusedError as error:
                if not self._mend(hook, error):
                    self._trouble(hook, error)
                    raise
            except FeedError as error:
                self._trouble(hook, error)
                raise
        self.passed(hook.name, list(hook.waiting))
        hook.last = hook.floor = NONE if at is None else at
        hook.came.clear()
        self.progress.streams += not hook.begun
        hook.begun = True

    async def _take(
        self, hook: Hook, id_: int | None, body: bytes
    ) -> tuple[int, bool, asyncio.Future[None] | None]:
        drawn = id_ is None
        if id_ is None:
            id_ = hook.last + 1
        if id_ > LAST_ID:
            raise _RequestError(
                409, "NO_NEXT_ID", f"{hook.name!r} has reached the highest possible id"
            )
        if id_ <= hook.last:
            return id_, False, self._again(hook, id_)
        hook.refused.pop(id_, None)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_heard)
        # Register it before sending: its outcome may be reported before `send` returns.
        before, hook.last = hook.last, id_
        size = len(body) + MESSAGE_OVERHEAD_BYTES
        hook.waiting[id_] = Handed(future, size, drawn)
        self._held += size
        try:
            await self._send(hook, id_, body)
        except BaseException:
            if hook.last == id_:
                hook.last = before
            if hook.waiting.pop(id_, None) is not None:
                self._held -= size
            raise
        self.progress.took(hook.name, id_, 1)
        if hook.watch is None:
            hook.watch = asyncio.get_running_loop().create_task(self._watch(hook))
        return id_, True, future

    async def _send(self, hook: Hook, id_: int, body: bytes) -> None:
        while True:
            try:
                await self.connector.send(hook.name, id_, body)
                return
            except TooLargeError as error:
                raise _RequestError(413, "TOO_LARGE", str(error)) from error
            except RefusedError as error:
                if not self._mend(hook, error):
                    self._trouble(hook, error)
                    raise
            except FeedError as error:
                self._trouble(hook, error)
                raise

    def _again(self, hook: Hook, id_: int) -> asyncio.Future[None] | None:
        """Return the future of a message that was sent before, or None if it is in the flow.

        Raises `_RequestError` if the message was refused, or its id is out of order.
        """
        if id_ in hook.waiting:
            return hook.waiting[id_].future
        if id_ in hook.refused:
            raise _RequestError(*hook.refused[id_])
        if id_ <= hook.floor or id_ in hook.came:
            return None
        raise _RequestError(
            409, "OUT_OF_ORDER",
            f"ids of {hook.name!r} increase: {id_} was not received before {hook.last}, and comes too late",
        )  # fmt: skip

    def acknowledged(self, stream: str, por: int) -> None:
        """Answer the requests up to the id `por`, which are in a committed snapshot; for the connector's `on_ack`."""
        self.progress.acknowledged(stream, por)
        hook = self._hooks.get(stream)
        if hook is None:
            return
        if hook.begun and por > hook.last:  # others have sent the stream
            self.passed(stream, list(hook.waiting))
        while hook.waiting and (id_ := next(iter(hook.waiting))) <= por:
            self._settle(hook, id_)
            hook.came[id_] = None
        while len(hook.came) > REMEMBERED_IDS:
            hook.floor, _ = hook.came.popitem(last=False)

    def passed(self, stream: str, ids: Iterable[int]) -> None:
        """Refuse messages that may not be in the flow, because it has higher ids of the stream from others."""
        hook = self._hooks.get(stream)
        if hook is None:
            return
        for id_ in ids:
            handed = hook.waiting.get(id_)
            if handed is None:
                continue
            text = f"others send {stream!r} too, and whether message {id_} is in the flow cannot be known"
            if handed.drawn:
                self._settle(hook, id_, _BusyError(f"{text}; send it again"))
            else:
                self._refuse(hook, id_, 409, "PASSED_OVER", text)

    def _refuse(self, hook: Hook, id_: int, status: int, code: str, text: str) -> None:
        """Refuse a message that will not be in the flow; sending it again gets the same answer."""
        hook.refused[id_] = status, code, text
        while len(hook.refused) > REMEMBERED_IDS:
            hook.refused.popitem(last=False)
        if id_ in hook.waiting:
            self._settle(hook, id_, _RequestError(status, code, text))

    def _settle(self, hook: Hook, id_: int, error: Exception | None = None) -> None:
        """Complete the request that waits for a message: acknowledged, or failed with `error`."""
        future, size, _ = hook.waiting.pop(id_)
        self._held -= size
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    async def _watch(self, hook: Hook) -> None:
        """Handle errors of a stream as long as messages of it wait."""
        try:
            while hook.waiting:
                try:
                    await self.connector.wait(hook.name, next(reversed(hook.waiting)))
                except RefusedError as error:
                    if not self._mend(hook, error):
                        self._trouble(hook, error)
                        return
                except FeedError as error:
                    self._trouble(hook, error)
                    return
        finally:
            hook.watch = None

    def _mend(self, hook: Hook, error: RefusedError) -> bool:
        """Drop the message that the flow has refused, and continue; return False if the error has another cause."""
        id_ = error.id
        if self.connector.error is not None or id_ is None or error.stream != hook.name:
            return False
        if not self.connector.skip(hook.name, id_):
            return False
        self._refuse(hook, id_, 422, "REFUSED", str(error))
        if id_ == hook.last:  # so that a corrected message may have this id
            pending = (hook.waiting, hook.came)
            hook.last = max([hook.floor, *(next(reversed(ids)) for ids in pending if ids)])
        return True

    def _trouble(self, hook: Hook, error: FeedError) -> None:
        """Fail the waiting requests of a stream that cannot continue; fail all if nothing can be sent any more."""
        if self.connector.error is not None or isinstance(error, RewindError):
            self._fail(error)
        elif isinstance(error, RefusedError):
            self.progress.failed[hook.name] = str(error)
            for id_ in list(hook.waiting):
                self._settle(hook, id_, _BusyError(str(error)))

    def _fail(self, error: Exception) -> None:
        """Fail all requests: nothing more can be sent until this program is restarted."""
        if not self.failed.done():
            self.failed.set_exception(error)
        for hook in self._hooks.values():
            for id_ in list(hook.waiting):
                self._settle(hook, id_, _BusyError(str(error)))


def _number(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= MAX_GIVEN_ID:
        return int(text)
    text = f"an id is a whole number from 0 to {MAX_GIVEN_ID}, not {text[:50]!r}"
    raise _RequestError(400, "BAD_ID", text)


def _later(code: str, error: Exception) -> web.Response:
    response = refusal(503, code=code, message=str(error))
    response.headers["Retry-After"] = "1"
    return response


def _heard(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # mark it as retrieved, whether or not a request waits for it
