"""`railgun sink files` and `railgun sink table`: run a sink server in this process, until SIGTERM or Ctrl-C stops it.

The command prints what the start has found, where the server listens, its progress (at most once a second), votes of
no, errors of the target, and the end.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from typing import Any, Final

from railgun.cli.arguments import add_confirmation, add_listen
from railgun.cli.errors import DONE, FAILED, NO_NODE, USAGE, CommandError
from railgun.cli.output import Output
from railgun.cli.parsing import Subcommands
from railgun.cli.sink_data import drop, list_, moved
from railgun.errors import RailgunError, said
from railgun.sinkserver.file_target import FileTarget
from railgun.sinkserver.server import SinkServer
from railgun.sinkserver.table_target import TableTarget
from railgun.sinkserver.targets import Target
from railgun.transport.registry import Registry

REPORT_INTERVAL_S: Final = 1.0
"""Time between two lines of progress."""
_CODES: Final = {
    "NO_TLS": USAGE, "BAD_URL": USAGE, "BAD_TABLE": USAGE, "NO_DRIVER": USAGE, "OTHER_TARGET": USAGE,
    "IN_USE": NO_NODE, "PORT_TAKEN": NO_NODE,
}  # fmt: skip


def files(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Append the results of flows to a file, as lines."""
    return _sink(options, out, lambda: FileTarget(options.path, raw=options.raw))


def table(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Insert the results of flows into a table, as rows."""
    return _sink(options, out, lambda: TableTarget(options.url, options.table))


def _sink(options: argparse.Namespace, out: Output, target: Any) -> int:
    if (options.certificate is None) != (options.key is None):
        raise CommandError(USAGE, "usage", "a certificate and its key belong together: give both")
    try:
        return asyncio.run(_serve(options, out, target()))
    except RailgunError as error:
        code = str(getattr(error, "code", "FAILED"))
        kind = code.lower().replace("_", "-")
        raise CommandError(_CODES.get(code, FAILED), kind, str(error)) from error
    except OSError as error:  # of the data directory or the certificate
        raise CommandError(FAILED, "disk", f"the sink cannot start: {said(error)}") from error


async def _serve(options: argparse.Namespace, out: Output, target: Target) -> int:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stopped.set)
    reporter = _Reporter(out)
    server = SinkServer(
        target, options.data, host=options.host, port=options.port,
        certificate=options.certificate, key=options.key, told=reporter.handle,
    )  # fmt: skip
    await server.start()
    try:
        waiting = server.counts()
        out.data(
            listening={
                "host": server.host, "port": server.port, "data": str(server.data), "target": str(target),
            },
            recovery={"found": server.recovered, **waiting},
        )  # fmt: skip
        left = waiting["prepared"] + waiting["open"]
        out.line(
            f"{server.data}: " + (f"{left} transactions wait for their flows" if left else "nothing waits")
            + ("" if not server.recovered else "; recovery has found:")
        )  # fmt: skip
        for line in server.recovered:
            out.line(f"  {line}", "yellow")
        secured = " with TLS" if server.certificate is not None else ""
        out.line(
            f"listening on {server.host}:{server.port}{secured}, for {target}; Ctrl-C stops",
            "green",
        )
        await stopped.wait()
        for number in signals:  # a second signal ends the process at once
            loop.remove_signal_handler(number)
        out.line("stopping")
    finally:
        await server.stop()
    reporter.show()
    left = sum(server.counts()[state] for state in ("prepared", "open"))
    out.data(stopped=True, **server.counts())
    out.line(f"stopped: everything is on disk; {left} transactions wait for their flows")
    return DONE


class _Reporter:
    """Prints the events of the server, and its progress at most once in `REPORT_INTERVAL_S`."""

    def __init__(self, out: Output) -> None:
        self.out = out
        self._counts: dict[str, Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def handle(self, kind: str, data: dict[str, Any]) -> None:
        """Print an event of the server; remember the counts of a commit for the next line of progress."""
        if kind == "committed":
            self._counts = data
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self.show)
            return
        self.out.data(**{kind.replace("-", "_"): data})
        labels = {"vote-no": "votes no", "failed": "failed", "refused": "refused a session"}
        self.out.line(f"{labels[kind]}: {data['text']} ({data['code']})", "yellow")

    def show(self) -> None:
        """Print the progress, if there was a commit since the last time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._counts is not None:
            counts, self._counts = self._counts, None
            self.out.data(committed=counts)
            self.out.line(
                f"committed: {counts['records']:,} records in {counts['transactions']:,} transactions; "
                f"{counts['prepared']} prepared, {counts['open']} under way"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands `files`, `table`, `list`, `drop` and `moved`."""
    commands = Subcommands(parser)
    command = commands.add(
        "files", files, "append records to a file as lines, until SIGTERM or Ctrl-C"
    )
    command.add_argument("path", metavar="PATH", help="the file; created if it does not exist")
    command.add_argument(
        "--raw", action="store_true", help="write bytes as they are, without line ends"
    )
    _add_data(command)
    add_listen(command, 7373)

    command = commands.add(
        "table",
        table,
        "insert JSON records into a table of SQLite or PostgreSQL, until SIGTERM or Ctrl-C",
    )
    command.add_argument(
        "url", metavar="URL", help="sqlite:///FILE, or postgresql://USER@HOST/DATABASE"
    )
    command.add_argument(
        "table", metavar="TABLE",
        help="the table; if it does not exist, it is created with the columns of the first records",
    )  # fmt: skip
    _add_data(command)
    add_listen(command, 7373)

    command = commands.add(
        "list", list_, "list the transactions that wait, while the sink is stopped"
    )
    _add_data(command)
    command = commands.add(
        "drop", drop, "give up a transaction: its records are lost, and its flow continues"
    )
    command.add_argument("id", metavar="ID", help="ID of the transaction, as `list` shows it")
    _add_data(command)
    add_confirmation(command)
    command = commands.add(
        "moved", moved, "forget where the target is, so that the sink can start with its new place"
    )
    _add_data(command)
    add_confirmation(command)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", default="railgun-sink",
        help="data directory of the sink; flows on this machine find it there (default: railgun-sink)",
    )  # fmt: skip
