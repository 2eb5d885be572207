"""Webhooks: HTTP requests, pushed into a flow. A POST is a message.

    POST /STREAM        the body is the message; the header X-Message-Id may hold its id
    POST /STREAM/ID     the id in the path
    GET  /health        200, or 503 while there is no connection to the flow

Rules:

1. 200 is answered when the message is in a committed snapshot of the flow, and no earlier: who hears it may forget the
   message. Who asks for less (`?wait=no`, or `early`) gets 202 as soon as it is handed over; it is lost if this program
   ends before the flow has it.
2. Ids are whole numbers from 0 on that go up within a stream. Who gives them can send a message again, and it is taken
   once: `{"duplicate": true}`. Who gives none gets the next one; sent again, it is another message. The last ids there
   are cannot be given, so that there is a next one.
3. An id at or below what the flow has counts as a duplicate, for what was sent before this program was started cannot
   be known; one that is known not to have come (a lower one than others that wait, or came lately) is 409.
4. Nothing grows without bounds: a body has a largest size (413), and all that waits for the flow has (503, with
   Retry-After). Of too many streams the one that was not used for longest is let go.
5. A message that the flow refuses is answered with 422, and the stream goes on without it.
6. At the end nothing more is taken, and what waits is answered when it is acknowledged, or after a while with 503.
7. A stream is for one program at a time. An id is drawn only while the stream is open here, after what the flow has of
   it then. Where the flow has more of a stream than was sent from here, others send it too, and what of ours came
   cannot be known: nobody is told 200 then.
8. What is wrong with a request, or a stream, is answered to those who ask for it. This program ends only when nothing
   can be sent any more, or when the flow has forgotten what it had acknowledged.
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
LARGEST: Final = 512 << 10  # bytes of a body
WAITING: Final = 64 << 20  # bytes of messages that wait for the flow
PATIENCE: Final = 30.0  # seconds for which a request waits
REMEMBERED: Final = 1_000  # ids of a stream that are known to have come
MOST_STREAMS: Final = 10_000
HIGHEST: Final = LAST_ID - (1 << 32)  # of the ids that callers give
OVERHEAD: Final = 200  # bytes of memory that a message takes, besides its body
LOOK: Final = 0.5  # seconds between two looks where the flow is, at the start of a stream
ID: Final = "X-Message-Id"
_LOG: Final = logging.getLogger(__name__)
R = TypeVar("R")


class ListenError(FeedError):
    """Webhooks cannot be received at this address."""


def open_to_all(host: str) -> ListenError:
    """Why not to listen there."""
    return ListenError(
        f"{host} can be reached from elsewhere, and what is sent there can be read: give a certificate and its key, or "
        "listen on 127.0.0.1"
    )


class _BusyError(Exception):
    """Not now."""


class _WrongError(Exception):
    """What is wrong with a request."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


class Handed(NamedTuple):
    """A message that the connector has: who is to hear of it, its size, and whether its id was drawn here."""

    future: asyncio.Future[None]
    size: int
    drawn: bool


@dataclass(slots=True)
class Hook:
    """A stream that requests come for. An id up to `last` is one that waits, is refused, came, or is out of order."""

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: bool = False  # whether it is known where the flow is
    last: int = NONE
    floor: int = NONE  # up to it, the flow has what was ever sent
    waiting: OrderedDict[int, Handed] = field(default_factory=OrderedDict)
    """What is handed over and not acknowledged."""
    came: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """What is acknowledged, above the floor."""
    refused: OrderedDict[int, tuple[int, str, str]] = field(default_factory=OrderedDict)
    """What will not be in the flow: how that is answered."""
    watch: asyncio.Task[None] | None = None


class Webhooks(HttpPort):
    """Listens, and pushes what comes; `acknowledged` has to be the connector's `on_ack`.

    `waiting`: bytes of messages that wait for the flow, half of what the connector keeps at most.
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
        largest: int = LARGEST,
        waiting: int = WAITING,
        patience: float = PATIENCE,
        progress: Progress | None = None,
    ) -> None:
        if tls is None and not is_loopback(host):
            raise open_to_all(host)
        self.connector = connector
        self.early = early
        self.largest, self.waiting, self.patience = largest, waiting, patience
        self.progress = progress or Progress()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has an exception when nothing can be sent any more."""
        self.failed.add_done_callback(_heard)
        self._token = None if token is None else token.encode()
        self._hooks: OrderedDict[str, Hook] = OrderedDict()  # the one used last is the last
        self._tasks: set[asyncio.Task[Any]] = set()
        self._held = 0  # bytes of messages that wait for the flow
        self._waits: set[asyncio.Timeout] = set()  # of requests that were read
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        app = web.Application(middlewares=[self._guarded], client_max_size=largest)
        app.router.add_get("/health", self._health)
        app.router.add_post("/{stream}", self._post)
        app.router.add_post("/{stream}/{id}", self._post)
        super().__init__(app, host, port, tls)

    async def start(self) -> None:
        """Listen; raises `ListenError` if that cannot be."""
        try:
            await self.open()
        except OSError as error:
            raise ListenError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror or error}"
            ) from error

    async def stop(self, patience: float) -> None:
        """Take nothing more, answer what waits within a time, and end."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._settled()
        for waits in self._waits:
            with contextlib.suppress(RuntimeError):  # it is over this very moment
                waits.reschedule(0)
        for task in [*self._tasks, *(hook.watch for hook in self._hooks.values())]:
            if task is not None:
                task.cancel()
        await self.close()

    async def _settled(self) -> None:
        await self._idle.wait()
        for hook in list(self._hooks.values()):  # also what nobody waits for
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
        except _WrongError as error:
            return refusal(error.status, code=error.code, message=str(error))
        except web.HTTPException as error:
            told = (
                f"a body has at most {self.largest:,} bytes"
                if error.status == 413
                else error.reason
            )
            return refusal(error.status, code=error.reason.upper().replace(" ", "_"), message=told)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except FeedError as error:
            return _later("FLOW", error)
        except Exception as error:
            _LOG.exception("a request has failed in a way nobody has thought of")
            return refusal(500, code="INTERNAL", message=f"{type(error).__name__}: {error}")

    async def _health(self, request: web.Request) -> web.Response:
        connected = self.connector.connected and not self._stopping
        return answer({"connected": connected, **self.progress.told()}, 200 if connected else 503)

    # ------------------------------------------------------------ messages

    async def _post(self, request: web.Request) -> web.Response:
        told = request.match_info.get("id", request.headers.get(ID))
        id_ = None if told is None else _number(told)
        wait = request.query.get("wait", "no" if self.early else "ack")
        if wait not in ("ack", "no"):
            raise _WrongError(400, "BAD_REQUEST", f"wait is 'ack' or 'no', not {wait[:50]!r}")
        name = request.match_info["stream"]
        try:
            check_name(name)
        except FeedError as error:
            raise _WrongError(400, "BAD_NAME", str(error)) from error
        body = await self._body(request)
        return await self._answer(name, id_, body, wait)

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.patience):
                return await request.read()
        except TimeoutError:
            text = f"the body has not come within {self.patience:g} s"
            raise _WrongError(408, "REQUEST_TIMEOUT", text) from None
        except (HttpProcessingError, web.RequestPayloadError) as error:
            text = " ".join(str(error).split())
            raise _WrongError(400, "BAD_BODY", f"the body cannot be read: {text}") from error

    async def _answer(self, name: str, id_: int | None, body: bytes, wait: str) -> web.Response:
        if self._stopping:
            raise _BusyError("this program ends; send it again")
        size = len(body) + OVERHEAD
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
        """Give a message to the connector: its id, whether it is new, and what to wait for."""
        hook = await self._locked(name)  # so they are taken in the order in which they come
        try:
            if id_ is None or not hook.begun:
                await self._begin(hook)
        except BaseException:
            hook.lock.release()
            raise
        # Who asks may go away. What is begun is done, and nobody else draws an id before it is.
        taking = self._task(self._take(hook, id_, body))
        taking.add_done_callback(lambda _: hook.lock.release())
        return await asyncio.shield(taking)

    def _task(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Work that goes on if nobody waits for it any more."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_heard)
        return task

    async def _locked(self, name: str) -> Hook:
        """The hook of a stream, which nobody else uses until its lock is released."""
        while True:
            while (hook := self._hooks.get(name)) is None and len(self._hooks) >= MOST_STREAMS:
                await self._make_room()
            if hook is None:
                hook = self._hooks[name] = Hook(name)
            await hook.lock.acquire()
            if self._hooks.get(name) is hook:  # else it was let go meanwhile
                self._hooks.move_to_end(name)
                return hook
            hook.lock.release()

    async def _make_room(self) -> None:
        """Let go of the stream that was not used for longest."""
        for hook in self._hooks.values():
            if not hook.waiting and not hook.lock.locked():
                await asyncio.shield(self._task(self._let_go(hook)))
                return
        raise _BusyError(f"{MOST_STREAMS:,} streams at the same time are the most")

    async def _let_go(self, hook: Hook) -> None:
        async with hook.lock:
            if hook.begun:
                with contextlib.suppress(FeedError):
                    await self.connector.end(hook.name)
                self.progress.streams -= 1
            del self._hooks[hook.name]

    async def _begin(self, hook: Hook) -> None:
        """Learn where the flow is, if others have sent the stream since that was known.

        Nothing is taken before that is in a snapshot: else the flow might go back behind it.
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
                    async with asyncio.timeout(LOOK):
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
            raise _WrongError(409, "NO_NEXT_ID", f"{hook.name!r} has the last id that there is")
        if id_ <= hook.last:
            return id_, False, self._again(hook, id_)
        hook.refused.pop(id_, None)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_heard)
        # It waits from now on: what becomes of it may be heard before it is handed over whole.
        before, hook.last = hook.last, id_
        size = len(body) + OVERHEAD
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
                raise _WrongError(413, "TOO_LARGE", str(error)) from error
            except RefusedError as error:
                if not self._mend(hook, error):
                    self._trouble(hook, error)
                    raise
            except FeedError as error:
                self._trouble(hook, error)
                raise

    def _again(self, hook: Hook, id_: int) -> asyncio.Future[None] | None:
        """An id that is not above all others: what to wait for, if it came before."""
        if id_ in hook.waiting:
            return hook.waiting[id_].future
        if id_ in hook.refused:
            raise _WrongError(*hook.refused[id_])
        if id_ <= hook.floor or id_ in hook.came:
            return None
        raise _WrongError(
            409, "OUT_OF_ORDER",
            f"ids of {hook.name!r} go up: {hook.last} came before {id_}, which did not come then",
        )  # fmt: skip

    def acknowledged(self, stream: str, por: int) -> None:
        """What is in a committed snapshot; for the connector's `on_ack`."""
        self.progress.acknowledged(stream, por)
        hook = self._hooks.get(stream)
        if hook is None:
            return
        if hook.begun and por > hook.last:  # not from here
            self.passed(stream, list(hook.waiting))
        while hook.waiting and (id_ := next(iter(hook.waiting))) <= por:
            self._settle(hook, id_)
            hook.came[id_] = None
        while len(hook.came) > REMEMBERED:
            hook.floor, _ = hook.came.popitem(last=False)

    def passed(self, stream: str, ids: Iterable[int]) -> None:
        """The flow has higher ids of a stream, from others, and these may not be in it: nobody is to hear 200."""
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
        """A message will not be in the flow; whoever sends it again hears the same."""
        hook.refused[id_] = status, code, text
        while len(hook.refused) > REMEMBERED:
            hook.refused.popitem(last=False)
        if id_ in hook.waiting:
            self._settle(hook, id_, _WrongError(status, code, text))

    def _settle(self, hook: Hook, id_: int, error: Exception | None = None) -> None:
        """Tell who waits for a message what became of it."""
        future, size, _ = hook.waiting.pop(id_)
        self._held -= size
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    async def _watch(self, hook: Hook) -> None:
        """As long as messages of a stream wait: hear what is wrong with them."""
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
        """Go on without a message that the flow has refused; False: that is not what is wrong."""
        id_ = error.id
        if self.connector.error is not None or id_ is None or error.stream != hook.name:
            return False
        if not self.connector.skip(hook.name, id_):
            return False
        self._refuse(hook, id_, 422, "REFUSED", str(error))
        if id_ == hook.last:  # so it may come again, as it should be
            known = (hook.waiting, hook.came)
            hook.last = max([hook.floor, *(next(reversed(ids)) for ids in known if ids)])
        return True

    def _trouble(self, hook: Hook, error: FeedError) -> None:
        """A stream cannot go on, or nothing can."""
        if self.connector.error is not None or isinstance(error, RewindError):
            self._fail(error)
        elif isinstance(error, RefusedError):
            self.progress.failed[hook.name] = str(error)
            for id_ in list(hook.waiting):
                self._settle(hook, id_, _BusyError(str(error)))

    def _fail(self, error: Exception) -> None:
        """Nothing more can be sent: this program is to be started anew."""
        if not self.failed.done():
            self.failed.set_exception(error)
        for hook in self._hooks.values():
            for id_ in list(hook.waiting):
                self._settle(hook, id_, _BusyError(str(error)))


def _number(told: str) -> int:
    if told.isascii() and told.isdecimal() and len(told) <= 19 and int(told) <= HIGHEST:
        return int(told)
    text = f"an id is a whole number from 0 to {HIGHEST}, not {told[:50]!r}"
    raise _WrongError(400, "BAD_ID", text)


def _later(code: str, error: Exception) -> web.Response:
    made = refusal(503, code=code, message=str(error))
    made.headers["Retry-After"] = "1"
    return made


def _heard(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # whether anybody waits for it or not
