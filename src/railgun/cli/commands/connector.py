"""`railgun connector`: ready-made programs that push into a flow (`railgun.ingest.ready.tail`, `table`, `webhooks`).

All of them report their progress now and then, and stop in order on SIGTERM or Ctrl-C. They need not wait for
acknowledgements then: messages that were not acknowledged are sent again by the next start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from railgun.cli.arguments import add_listen, add_registry, positive, seconds
from railgun.cli.errors import DONE, FAILED, NO_JOB, NO_NODE, REFUSED, USAGE, CommandError
from railgun.cli.output import Output
from railgun.cli.parsing import Subcommands
from railgun.errors import said
from railgun.ingest.client import KEEP_BYTES, Connector
from railgun.ingest.errors import FeedError, NoFlowError, RefusedError, SourceError, TokenError
from railgun.ingest.ready.progress import Progress
from railgun.ingest.ready.table import Table, TableError, open_database
from railgun.ingest.ready.tail import Tail
from railgun.ingest.ready.webhooks import ListenError, Webhooks, open_to_all
from railgun.transport.listen_rules import is_loopback
from railgun.transport.registry import Registry

REPORT_INTERVAL_S: Final = 1.0
"""Time between two lines of progress, on a terminal and for programs."""
LOG_INTERVAL_S: Final = 10.0
"""Time between two lines of progress elsewhere, as in a log file."""

Work = Callable[[Connector, Progress], Coroutine[Any, Any, None]]


def tail(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Push the lines of files that grow, as `railgun connector tail`."""

    async def work(connector: Connector, progress: Progress) -> None:
        def failed(stream: str, error: Exception) -> None:
            warn(stream, str(error))

        def warn(stream: str, text: str) -> None:
            out.warn(f"{stream}: {text}", stream=stream)

        following = Tail(
            connector, options.path, options.pattern, prefix=options.prefix, once=options.once,
            poll=options.poll, progress=progress, on_error=failed, on_warning=warn,
        )  # fmt: skip
        await following.run()
        for stream in following.unfinished:
            out.warn(f"{stream}: its last line is not complete, and was left", stream=stream)

    return run(options, out, "tail", work)


def table(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Push new rows of a database table, as `railgun connector table`."""
    columns = None if options.columns is None else options.columns.split(",")
    try:
        database = open_database(
            options.database, options.table, options.id, columns, options.key, options.time
        )
    except TableError as error:
        raise CommandError(USAGE, "usage", str(error)) from error

    async def work(connector: Connector, progress: Progress) -> None:
        following = Table(
            connector, database, options.stream or options.table, key=options.key is not None,
            time=options.time is not None, batch=options.batch, poll=options.poll, once=options.once,
            patience=options.timeout, progress=progress, on_trouble=out.warn,
        )  # fmt: skip
        await following.run()

    return run(options, out, "table", work)


def http(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Receive webhooks and push them, as `railgun connector http`."""
    if (options.certificate is None) != (options.key is None):
        raise CommandError(USAGE, "usage", "a certificate and its key belong together: give both")
    tls: ssl.SSLContext | None = None
    if options.certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            tls.load_cert_chain(options.certificate, options.key)
        except OSError as error:
            raise CommandError(
                USAGE, "certificate", f"{options.certificate} cannot be used: {said(error)}"
            ) from error
    elif not is_loopback(options.host):
        raise CommandError(USAGE, "no-tls", str(open_to_all(options.host)))
    token = options.token if options.token is not None else os.environ.get("RAILGUN_WEBHOOK_TOKEN")
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise CommandError(USAGE, "token", "a token is text without spaces around it")

    async def work(connector: Connector, progress: Progress) -> None:
        hooks = Webhooks(
            connector, options.host, options.port, token=token, tls=tls, early=options.early,
            largest=options.largest, waiting=options.waiting, patience=options.patience, progress=progress,
        )  # fmt: skip
        connector.on_ack, connector.on_passed = hooks.acknowledged, hooks.passed
        await hooks.start()
        try:
            out.data(listening={"url": hooks.url})
            out.line(f"listening on {hooks.url}; POST /STREAM", "green")
            await asyncio.shield(hooks.failed)
        except asyncio.CancelledError:
            out.line("stopping: answering requests in progress")
            raise
        finally:
            await hooks.stop(options.drain)

    return run(options, out, "http", work, keep=2 * options.waiting)


# ---------------------------------------------------------------- shared by all connectors


def run(
    options: argparse.Namespace, out: Output, name: str, work: Work, keep: int = KEEP_BYTES
) -> int:
    """Connect to the flow, and run `work` until it ends or a signal stops it.

    `keep` is the number of bytes of messages that are kept until they are acknowledged.
    """
    try:
        return _run_loop(_run(options, out, name, work, keep))
    except FeedError as error:
        raise command_error(error) from error


def command_error(error: FeedError) -> CommandError:
    """Turn an error of a connector into a `CommandError` with its exit code."""
    kind = type(error).__name__.removesuffix("Error").lower()
    if isinstance(error, RefusedError):  # the flow refuses one stream, or everything
        exit_code = FAILED if error.stream else REFUSED
        return CommandError(exit_code, error.code.lower().replace("_", "-"), str(error))
    if isinstance(error, TokenError | SourceError):
        return CommandError(REFUSED, kind, str(error))
    if isinstance(error, ListenError):
        return CommandError(NO_NODE, "listen", str(error))
    if isinstance(error, NoFlowError):
        return CommandError(NO_JOB, "no-flow", str(error))
    return CommandError(FAILED, kind, str(error))


def _run_loop(work: Coroutine[Any, Any, int]) -> int:
    """Run on the faster event loop, uvloop, if it is installed."""
    try:
        import uvloop
    except ImportError:  # as on Windows
        return asyncio.run(work)
    return int(uvloop.run(work))


async def _run(options: argparse.Namespace, out: Output, name: str, work: Work, keep: int) -> int:
    progress = Progress()
    try:
        connector = Connector(
            options.flow, source=options.source, token=_token(options), registry=options.registry,
            timeout=options.timeout, keep=keep, program=f"railgun connector {name}",
            on_ack=progress.acknowledged,
        )  # fmt: skip
    except FeedError as error:  # an address or a secret that makes no sense
        raise CommandError(USAGE, "usage", str(error)) from error
    stopped = _stop_event()
    opening = asyncio.ensure_future(connector.open())
    reporting: asyncio.Task[None] | None = None
    try:
        if not await _unless_stopped(stopped, opening):
            return DONE
        out.data(connected={"flow": options.flow})
        out.line(f"connected to {options.flow}; Ctrl-C stops", "green")
        reporting = asyncio.create_task(_report(out, progress))
        over = await _unless_stopped(stopped, asyncio.ensure_future(work(connector, progress)))
    finally:
        if reporting is not None:
            reporting.cancel()
        await connector.close()
    out.data(stopped=not over, progress=progress.figures(), streams_failed=progress.failed)
    out.line(f"{'done' if over else 'stopped'}: {progress}")
    return FAILED if progress.failed else DONE


def _stop_event() -> asyncio.Event:
    """Return an event that SIGTERM or Ctrl-C sets; a second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        stopped.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(number, stop)
    return stopped


async def _unless_stopped(stopped: asyncio.Event, work: asyncio.Future[None]) -> bool:
    """Wait for `work` and return True; if `stopped` is set first, cancel it, wait for its end and return False."""
    waiting = asyncio.ensure_future(stopped.wait())
    try:
        both: list[asyncio.Future[Any]] = [work, waiting]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait([work])
    if work.cancelled():
        return False
    work.result()
    return True


async def _report(out: Output, progress: Progress) -> None:
    """Report progress now and then, if there is any."""
    before = ""
    status = out.console.status("") if out.console.is_terminal and not out.as_json else None
    with status or contextlib.nullcontext():
        while True:
            await asyncio.sleep(
                REPORT_INTERVAL_S if status is not None or out.as_json else LOG_INTERVAL_S
            )
            now = str(progress)
            if now == before:
                continue
            before = now
            if status is not None:
                status.update(now)
            else:
                out.data(progress=progress.figures())
                out.line(now)


def _token(options: argparse.Namespace) -> str | None:
    if options.token_file is None:
        return os.environ.get("RAILGUN_TOKEN")
    try:
        return Path(options.token_file).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise CommandError(
            USAGE, "token", f"there is no token in {options.token_file}: {said(error)}"
        ) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands `tail`, `table` and `http`."""
    commands = Subcommands(parser)
    command = commands.add(
        "tail", tail, "push the lines of files that grow, a message for each line"
    )
    _add_flow(command)
    command.add_argument("path", metavar="PATH", help="a file or a directory")
    command.add_argument(
        "--pattern", default="*", metavar="PATTERN",
        help="files to follow in the directory, such as *.log or **/*.log (default: *)",
    )  # fmt: skip
    command.add_argument(
        "--prefix", default="", metavar="TEXT",
        help="text to put before the names of streams (default: none)",
    )  # fmt: skip
    _add_polling(command, 0.5)

    command = commands.add(
        "table", table, "push the rows of a database table in the order of an increasing column"
    )
    _add_flow(command)
    command.add_argument(
        "database", metavar="URL",
        help="sqlite:///PATH (four slashes for an absolute path), or postgresql://USER@HOST/DATABASE",
    )  # fmt: skip
    command.add_argument("table", metavar="TABLE", help="name of the table, or SCHEMA.TABLE")
    command.add_argument(
        "--id", required=True, metavar="COLUMN", help="column with unique, increasing whole numbers"
    )
    command.add_argument(
        "--columns", metavar="A,B,…", help="columns of the payload (default: all columns)"
    )
    command.add_argument("--key", metavar="COLUMN", help="column with the key of messages")
    command.add_argument("--time", metavar="COLUMN", help="column with the event time of messages")
    command.add_argument(
        "--stream", metavar="NAME", help="name of the stream (default: the name of the table)"
    )
    command.add_argument(
        "--batch", type=positive, default=1000, metavar="N",
        help="rows to read in one query (default: 1000)",
    )  # fmt: skip
    _add_polling(command, 1.0)

    command = commands.add(
        "http", http, "receive webhooks: each POST to /STREAM or /STREAM/ID is a message"
    )
    _add_flow(command)
    add_listen(command, 7180)
    command.add_argument(
        "--token", metavar="TEXT",
        help="bearer token of requests; prefer RAILGUN_WEBHOOK_TOKEN: others on the machine can see what is typed",
    )  # fmt: skip
    command.add_argument(
        "--early", action="store_true",
        help="answer 202 when a message is received (default: 200 when it is in a committed snapshot)",
    )  # fmt: skip
    command.add_argument(
        "--largest", type=positive, default=512 << 10, metavar="BYTES",
        help="maximum size of a request body (default: 524288)",
    )  # fmt: skip
    command.add_argument(
        "--waiting", type=positive, default=64 << 20, metavar="BYTES",
        help="maximum size of messages that wait for the flow (default: 67108864)",
    )  # fmt: skip
    command.add_argument(
        "--patience", type=seconds, default=30.0, metavar="SECONDS",
        help="how long a request may wait for its answer (default: 30)",
    )  # fmt: skip
    command.add_argument(
        "--drain", type=seconds, default=10.0, metavar="SECONDS",
        help="how long to wait for messages in progress at the end (default: 10)",
    )  # fmt: skip


def _add_flow(parser: argparse.ArgumentParser) -> None:
    """Add which flow messages are pushed into."""
    parser.add_argument(
        "flow", metavar="FLOW",
        help="name of the job; or URL of its HTTP API; or HOST:PORT,… of workers, with the secret in RAILGUN_SECRET",
    )  # fmt: skip
    parser.add_argument(
        "--source", metavar="NAME", help="the source to push into (default: the only one)"
    )
    parser.add_argument(
        "--token-file", metavar="FILE",
        help="file with the token of the job's HTTP API, for a URL (default: RAILGUN_TOKEN)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=seconds, default=30.0, metavar="SECONDS",
        help="how long to wait for the flow at the start (default: 30)",
    )  # fmt: skip
    add_registry(parser)


def _add_polling(parser: argparse.ArgumentParser, poll_s: float) -> None:
    """Add how often new data is looked for, and whether the command ends."""
    parser.add_argument(
        "--poll", type=seconds, default=poll_s, metavar="SECONDS",
        help=f"time between checks for new data (default: {poll_s:g})",
    )  # fmt: skip
    parser.add_argument(
        "--once", action="store_true",
        help="exit when everything that exists now is acknowledged",
    )  # fmt: skip
