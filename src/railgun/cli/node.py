"""Connect commands to a node, and turn its errors into exit codes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from railgun.cli.errors import DONE, FAILED, NO_NODE, REFUSED, USAGE, CommandError
from railgun.cli.output import Output
from railgun.client.client import Client, connect
from railgun.client.errors import DuplicateIdError, NoAnswerError, StreamsError
from railgun.errors import said
from railgun.transport.error_codes import no_node

CONNECT_TIMEOUT_S: Final = 3.0
CALL_TIMEOUT_S: Final = 30.0
_BAD_INPUT: Final = ("BAD_SETTINGS", "BAD_REQUEST")


def talk(options: argparse.Namespace, work: Callable[[Client], Awaitable[int]]) -> int:
    """Connect to the node, run `work` with the client, and turn errors of the client into `CommandError`."""

    async def connected() -> int:
        async with await connect_by(options) as client:
            return await work(client)

    try:
        return asyncio.run(connected())
    except StreamsError as error:
        raise command_error(error) from error


async def connect_by(options: argparse.Namespace) -> Client:
    """Connect to the node that the options name; raise `CommandError` for a bad secret or certificate file."""
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
        options.node, secret=secret, data=data, name="cli", timeout=CONNECT_TIMEOUT_S, tls=tls
    )
    client.timeout = CALL_TIMEOUT_S
    return client


def command_error(error: StreamsError, **data: Any) -> CommandError:
    """Turn an error of the client into a `CommandError` with its exit code; `data` is added for programs."""
    code = REFUSED
    if isinstance(error, NoAnswerError):
        code = FAILED
    elif no_node(error.code):
        code = NO_NODE
    elif error.code in _BAD_INPUT:
        code = USAGE
    if isinstance(error, DuplicateIdError):
        data["offset"] = error.offset
    return CommandError(code, error.code.lower().replace("_", "-"), str(error), **data)


async def stoppable(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` until it ends, or until SIGTERM or Ctrl-C cancels it in order; a second signal ends it at once."""
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


def confirm(options: argparse.Namespace, out: Output, action: str) -> None:
    """Ask for confirmation of `action`; raise `CommandError` if it is declined or nobody can be asked."""
    if options.yes:
        return
    if out.as_json or not sys.stdin.isatty():
        raise CommandError(
            USAGE, "not-confirmed", f"{action}: that cannot be taken back; say --yes if it is meant"
        )
    out.console.print(f"{action}? That cannot be taken back. [y/N] ", end="", markup=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(FAILED, "declined", "nothing was done")


def purge(options: argparse.Namespace, out: Output, name: str) -> int:
    """Delete messages of a stream, after confirmation: all, or those before `options.before`."""
    which = "all messages" if options.before is None else f"all messages before {options.before}"
    confirm(options, out, f"delete {which} of {name}")

    async def work(client: Client) -> int:
        done = await client.purge(name, options.before)
        out.data(stream=name, **done)
        count = done["purged"]
        out.line(f"{name}: {count:,} message{'s' * (count != 1)} gone, begins at {done['first']:,}")
        return DONE

    return talk(options, work)
