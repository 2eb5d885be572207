"""The commands that talk to a node: streams, messages, requests, groups, dead letters."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import ssl
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, Final

from railgun.broker.protocol.metadata.fields import difference
from railgun.broker.settings import DEAD, REDRIVE, StreamSettings
from railgun.cli import streams_view as view
from railgun.cli.errors import DONE, FAILED, NO_NODE, REFUSED, USAGE, CommandError
from railgun.cli.output import Output
from railgun.client.checks import LEFT_OUT
from railgun.client.client import Client, connect
from railgun.client.errors import DuplicateIdError, NoAnswerError, StreamsError, refuse_damaged
from railgun.client.message import Message
from railgun.client.subscription import Subscription
from railgun.errors import said
from railgun.transport.error_codes import no_node
from railgun.transport.registry import Registry

PATIENCE: Final = 3.0  # seconds until there is no node
QUIET: Final = 1.0  # seconds without a message, while others work on theirs
LOOK: Final = 0.05  # seconds without a message, until a look whether it is the end
AT_ONCE: Final = 16  # commands that answer requests
CHUNK: Final = 1 << 18
FIXED: Final = ("kind", "region")  # of a stream, for ever
SETTINGS: Final = tuple(field.name for field in dataclasses.fields(StreamSettings))
_SENSELESS: Final = ("BAD_SETTINGS", "BAD_REQUEST")


# ---------------------------------------------------------------- talking to a node


def talk(options: argparse.Namespace, work: Callable[[Client], Awaitable[int]]) -> int:
    """Connect, work, and tell what goes wrong as commands do."""

    async def connected() -> int:
        async with await connect_by(options) as client:
            return await work(client)

    try:
        return asyncio.run(connected())
    except StreamsError as error:
        raise command_error(error) from error


async def connect_by(options: argparse.Namespace) -> Client:
    """A client of the node that the options name."""
    secret: str | None = None
    if options.secret_file is not None:
        try:
            secret = Path(options.secret_file).read_text("ascii").strip()
            bytes.fromhex(secret)
        except (OSError, ValueError) as error:
            raise CommandError(
                USAGE, "secret", f"there is no secret in {options.secret_file}: {said(error)}"
            ) from error
    tls: ssl.SSLContext | None = None
    if options.certificate is not None:
        try:
            tls = ssl.create_default_context(cafile=options.certificate)
        except OSError as error:
            raise CommandError(
                USAGE, "certificate", f"{options.certificate} cannot be used: {said(error)}"
            ) from error
    data = Path(options.data)
    client = await connect(
        options.node, secret=secret, data=data, name="cli", timeout=PATIENCE, tls=tls
    )
    client.timeout = 30.0
    return client


def command_error(error: StreamsError, **data: Any) -> CommandError:
    """What a client raises, with the exit code for it."""
    code = REFUSED
    if isinstance(error, NoAnswerError):
        code = FAILED
    elif no_node(error.code):
        code = NO_NODE
    elif error.code in _SENSELESS:
        code = USAGE
    if isinstance(error, DuplicateIdError):
        data["offset"] = error.offset
    return CommandError(code, error.code.lower().replace("_", "-"), str(error), **data)


async def _stoppable(work: Coroutine[Any, Any, int]) -> int:
    """Work until it is done, or SIGTERM or Ctrl-C ends it in order; a second Ctrl-C at once."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    stopped = False
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        nonlocal stopped
        stopped = True
        for number in signals:
            loop.remove_signal_handler(number)
        task.cancel()

    for number in signals:
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if stopped:
            return DONE
        raise


# ---------------------------------------------------------------- streams


def ensure(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Make a stream what it is asked to be."""
    names = (*SETTINGS, "region")
    asked = {name: getattr(options, name) for name in names if hasattr(options, name)}

    async def work(client: Client) -> int:
        done = await client.ensure(options.name, options.mode, **asked)
        out.data(stream=options.name, **done)
        result = done["result"]
        words = {"CREATED": "made", "UNCHANGED": "is so already", "UPDATED": "changed"}
        if result in words:
            out.line(f"{options.name}: {words[result]}")
        for name, values in done["differs"].items():
            if result == "DIFFERS":
                stays = "it stays so" if name in FIXED else "--mode overwrite changes it"
                text = f"{options.name}: {difference({name: values})}; {stays}"
                out.line(text, "yellow")
            else:
                both = (values["is"], values["asked"])
                out.line(f"  {name}: {' → '.join('none' if v is None else str(v) for v in both)}")
        return DONE

    return talk(options, work)


def streams(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Which streams there are."""

    async def work(client: Client) -> int:
        found = await client.streams()
        if not options.all:
            found = [one for one in found if not one["name"].startswith("_")]
        out.listing("streams", found, view.streams, "there are no streams yet")
        return DONE

    return talk(options, work)


def info(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """What there is to know of a stream."""

    async def work(client: Client) -> int:
        found = await client.describe(options.name)
        out.data(stream=found)
        out.show(view.stream(found))
        return DONE

    return talk(options, work)


def groups(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Which groups a stream has."""

    async def work(client: Client) -> int:
        found = await client.groups(options.stream)
        out.listing("groups", found, view.groups, f"{options.stream} has no groups")
        return DONE

    return talk(options, work)


def explain(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """What a group does."""
    return _tell_group(options, out, why=True)


def group_info(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """How far a group is."""
    return _tell_group(options, out, why=False)


def _tell_group(options: argparse.Namespace, out: Output, why: bool) -> int:
    async def work(client: Client) -> int:
        found = await client.group(options.stream, options.group)
        out.data(group=found)
        if why:
            out.line(f"{found['code']}: {found['text']}")
        out.show(view.group(found))
        return DONE

    return talk(options, work)


# ---------------------------------------------------------------- publishing


def publish(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Publish messages, or the lines of stdin."""
    stream: str = options.stream
    if options.id is not None and len(options.messages) != 1:
        raise CommandError(USAGE, "usage", "an ID is for one message: give one, as MESSAGE")

    async def work(client: Client) -> int:
        told = await client.describe(stream)
        ephemeral = told["settings"]["kind"] == "ephemeral"
        count, first, last = 0, None, None
        try:
            async for offsets in _published(client, options):
                count += len(offsets)
                if offsets and not ephemeral and options.acks != "none":
                    first, last = offsets[0] if first is None else first, offsets[-1]
                elif offsets and ephemeral:
                    last = offsets[-1]
        except StreamsError as error:
            raise command_error(error, published=count) from error
        words = f"{stream}: {count:,} message{'s' * (count != 1)}"
        if ephemeral:
            out.data(published=count, matched=last)
            out.line(words + (f", {last:,} listening" if last is not None else ""))
        else:
            out.data(published=count, first=first, last=last)
            where = "" if first is None else f", offset {first}"
            out.line(words + where + (f" to {last}" if first != last else ""))
        return DONE

    return talk(options, work)


async def _published(client: Client, options: argparse.Namespace) -> AsyncIterator[list[int]]:
    stream, given = options.stream, {"topic": options.topic or "", "acks": options.acks}
    if options.id is not None:
        [message] = options.messages
        yield [await client.publish(stream, message, id=options.id, **given)]
        return
    if options.messages:
        yield await client.publish_many(stream, options.messages, **given)
        return
    under_way: deque[asyncio.Task[list[int]]] = deque()
    try:
        async for lines in _lines():
            task = client.loop.create_task(client.publish_many(stream, lines, **given))
            under_way.append(task)
            await asyncio.sleep(0)  # in this order
            while under_way and (len(under_way) > AT_ONCE or under_way[0].done()):
                yield await under_way.popleft()
        while under_way:
            yield await under_way.popleft()
    except StreamsError:
        for done in await asyncio.gather(*under_way, return_exceptions=True):
            if isinstance(done, list):
                yield done
        raise


async def _lines() -> AsyncIterator[list[bytes]]:
    """The lines of stdin, as many as there are."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes] = asyncio.Queue(AT_ONCE)

    def read() -> None:  # in a thread that nobody waits for: it may never come back
        file = sys.stdin.fileno()
        with contextlib.suppress(RuntimeError, CancelledError):  # everything is over
            while data := os.read(file, CHUNK):
                asyncio.run_coroutine_threadsafe(arrived.put(data), loop).result()
            asyncio.run_coroutine_threadsafe(arrived.put(b""), loop).result()

    threading.Thread(target=read, daemon=True).start()
    begun: list[bytes] = []  # of the last line
    while data := await arrived.get():
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*begun, whole[0]])
            begun = []
            yield whole
        if rest:
            begun.append(rest)
    if begun:
        yield [b"".join(begun)]


# ---------------------------------------------------------------- consuming


def subscribe(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Print messages; with a group, ack them then."""
    if options.exclusive and not options.group:
        raise CommandError(USAGE, "usage", "--exclusive is for the members of a --group")
    if options.consumer and options.group:
        raise CommandError(USAGE, "usage", "--consumer is for one without a --group")

    async def work(client: Client) -> int:
        return await _stoppable(_print(client, options, out))

    return talk(options, work)


async def _print(client: Client, options: argparse.Namespace, out: Output) -> int:
    prefetch = min(1000, options.count or 1000)
    subscription = await client.subscribe(
        options.stream, group=options.group or LEFT_OUT, exclusive=options.exclusive,
        consumer=options.consumer or LEFT_OUT, start=options.start, matcher=options.matcher, prefetch=prefetch,
    )  # fmt: skip
    async with subscription:
        follow = options.follow
        if not subscription.persistent:
            if follow is False:
                raise CommandError(USAGE, "usage", f"{options.stream} is ephemeral: it has no end")
            follow = True
        acked = bool(subscription.group) and subscription.persistent
        warning: asyncio.Task[None] | None = None
        if follow and subscription.persistent and not subscription.group:
            warning = asyncio.create_task(_warn_of_copy(client, options.stream, out))
        try:
            async for messages in _messages(client, subscription, out, options.count, bool(follow)):
                if out.as_json:
                    for message in messages:
                        out.data(**as_data(message))
                else:
                    out.raw(b"".join([message.payload + b"\n" for message in messages]))
                if acked:
                    subscription.ack_all(messages)
            if warning is not None:
                await asyncio.wait([warning], timeout=PATIENCE)
        finally:
            if warning is not None:
                warning.cancel()
            if acked:
                await _flush(subscription, PATIENCE)
        for count, what in (
            (subscription.missed, "deleted before they could be delivered"),
            (subscription.lost, "lost: they came faster than they were taken"),
        ):
            if count:
                out.warn(f"{count:,} messages were {what}", messages=count)
    return DONE


async def _warn_of_copy(client: Client, stream: str, out: Output) -> None:
    """Warn whoever follows a stream if what there is of it was told by a copy that may be old."""
    with contextlib.suppress(StreamsError):  # of which whoever reads will hear
        told = await client.describe(stream)
        if told.get("from_copy"):
            out.warn(f"the end of {stream} is {told['from_copy']}", end=told["end"])


async def _messages(
    client: Client, subscription: Subscription, out: Output, most: int | None, follow: bool
) -> AsyncIterator[list[Message]]:
    """What comes, some at a time; unless it is followed, up to the end there is. Warns of an end that may be old."""
    left = most
    position = subscription.offset
    end: int | None = None
    if not follow and not subscription.group:
        told = await client.describe(subscription.stream)
        end = told["end"]
        if told.get("from_copy"):
            out.warn(f"the end of {subscription.stream} is {told['from_copy']}", end=end)
    quiet = 0.0
    while (left is None or left) and (end is None or position < end):
        try:
            some = min(1000, left or 1000, 1000 if end is None else end - position)
            found = await subscription.batch(some, None if follow else LOOK)
        except TimeoutError:
            quiet += LOOK
            if end is not None:
                told = await client.describe(subscription.stream)
                position = max(position, told["first"])
            elif await _at_end(client, subscription, quiet):
                break
            continue
        quiet = 0.0
        position = found[-1].offset + 1
        left = left and left - len(found)
        yield found
    if subscription.persistent and left != 0:
        refuse_damaged(await client.describe(subscription.stream))  # its end is not the stream's


async def _at_end(client: Client, subscription: Subscription, quiet: float) -> bool:
    """Whether a group has nothing more for its members; what others have may still come back."""
    await _flush(subscription)
    told = await client.group(subscription.stream, subscription.group)
    return not told["ready"] and (not told["in_flight"] or quiet >= QUIET)


async def _flush(subscription: Subscription, timeout: float | None = None) -> None:
    """Let the acks be on disk. Those that were lost with a connection are of messages that come again."""
    try:
        await subscription.flush(timeout)
    except StreamsError as error:
        if error.code not in ("ACK_STALE", "CONNECTION_LOST"):
            raise
        await subscription.flush(timeout)


def as_data(message: Message) -> dict[str, Any]:
    """A message for programs."""
    told: dict[str, Any] = {}
    if message.subscription.persistent:
        told |= {"offset": message.offset, "time": message.time / 1e6}
        if message.subscription.group:
            told["delivery"] = message.delivery
    else:
        told["topic"] = message.topic
    told["id"] = None if message.id is None else message.id.decode("utf-8", "backslashreplace")
    return told | {"headers": message.headers} | payload_data(message.payload)


def payload_data(payload: bytes) -> dict[str, str]:
    """A payload for programs: text, if it is that.

    >>> payload_data(b"hello"), payload_data(bytes([0, 255]))
    ({'payload': 'hello'}, {'base64': 'AP8='})
    """
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(payload).decode()}


# ---------------------------------------------------------------- requests


def request(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Ask, and print the answer."""

    async def work(client: Client) -> int:
        answer = await client.request(
            options.stream,
            options.message,
            topic=options.topic or "",
            timeout=options.timeout,
        )
        out.data(**payload_data(answer))
        out.raw(answer + b"\n")
        return DONE

    return talk(options, work)


def respond(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Answer requests, with a text or by a command."""
    words: list[str] = []
    if options.program is not None:
        try:
            words = shlex.split(options.program)
        except ValueError as error:
            raise CommandError(
                USAGE, "usage", f"--command {options.program!r}: {said(error)}"
            ) from error
        if not words or shutil.which(words[0]) is None:
            raise CommandError(USAGE, "usage", f"there is no command {' '.join(words[:1])!r}")

    async def work(client: Client) -> int:
        return await _stoppable(_respond(client, options, words, out))

    return talk(options, work)


async def _respond(
    client: Client, options: argparse.Namespace, words: list[str], out: Output
) -> int:
    subscription = await client.subscribe(
        options.stream, group=options.group or LEFT_OUT, matcher=options.matcher
    )
    tasks: set[asyncio.Task[None]] = set()
    async with subscription:
        if subscription.persistent:
            raise StreamsError(
                "NOT_EPHEMERAL", f"stream {options.stream!r} is persistent: it has no requests"
            )
        out.data(answering=options.stream)
        out.line(f"answering the requests of {options.stream}; Ctrl-C stops", "green")
        room = asyncio.Semaphore(AT_ONCE)
        left = options.count

        async def answer(message: Message) -> None:
            try:
                given = await _answer(message.payload, words) if words else options.text
                await message.respond(given)
                out.data(answered=True, **as_data(message))
            except (StreamsError, CommandError, OSError) as error:
                out.warn(f"a request is not answered: {said(error)}")
            finally:
                room.release()

        try:
            async for message in subscription:
                if not message.response:
                    continue  # somebody said something, and wants no answer
                await room.acquire()
                task = client.loop.create_task(answer(message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                left = left and left - 1
                if left == 0:
                    break
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return DONE


async def _answer(payload: bytes, words: list[str]) -> bytes:
    """What a command says to this, without the end of its last line."""
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        answer, _ = await process.communicate(payload)
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise CommandError(
            FAILED, "command", f"the command ended with exit code {process.returncode}"
        )
    return answer.removesuffix(b"\n")


# ---------------------------------------------------------------- dead letters


def dead_letters(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Which dead letters there are."""

    async def work(client: Client) -> int:
        found = [
            {"letter": message.offset, "buried": message.time / 1e6}
            | view.headers_of(message.headers)
            | {"redriven": redriven}
            async for message, redriven in _letters(client, options, out)
        ]
        out.listing("letters", found, view.letters, f"{options.stream} has no dead letters")
        return DONE

    return talk(options, work)


def show_dead_letters(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Dead letters, whole."""

    async def work(client: Client) -> int:
        count = 0
        async for message, redriven in _letters(client, options, out):
            count += 1
            headers = view.headers_of(message.headers)
            out.data(**as_data(message) | {"headers": headers, "redriven": redriven})
            out.line(view.letter(message.offset, headers, redriven), "bold")
            out.raw(message.payload + b"\n")
            if count == options.count:
                break
        if not count:
            out.line(f"{options.stream} has no dead letters")
        return DONE

    return talk(options, work)


async def _letters(
    client: Client, options: argparse.Namespace, out: Output
) -> AsyncIterator[tuple[Message, bool]]:
    """Yield dead letters, and whether each was redriven: those only if all are asked for."""
    stream: str = options.stream
    await client.describe(stream)  # or there is no such stream
    try:
        redriven = await _redriven(client, stream + DEAD)
        subscription = await client.subscribe(stream + DEAD)
    except StreamsError as error:
        if error.code == "NO_STREAM":  # none has died yet
            return
        raise
    async with subscription:
        async for messages in _messages(client, subscription, out, None, follow=False):
            for message in messages:
                gone = redriven(message.offset)
                if options.all or not gone:
                    yield message, gone


async def _redriven(client: Client, letters: str) -> Callable[[int], bool]:
    """Return what tells whether a letter was redriven, by its offset among the dead letters."""
    try:
        told = await client.admin("finished", name=letters, group=REDRIVE)
    except StreamsError as error:
        if error.code != "NO_GROUP":
            raise
        return lambda offset: False
    ends = [(0, told["floor"]), *map(tuple, told["ranges"])]
    firsts = [first for first, _ in ends]
    return lambda offset: offset < ends[bisect_right(firsts, offset) - 1][1]
