"""railgun: start flows and nodes, and talk to those that run.

Commands on running jobs need nothing of Spark, and do not load it: they read where the job is from its file
(`transport.registry`) and talk to its HTTP API. Nor does anything load a node or its client but what needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from railgun import __version__
from railgun.cli import arguments, view
from railgun.cli.arguments import number, seconds
from railgun.cli.client import Client, find
from railgun.cli.errors import (
    DONE,
    EXIT_CODES,
    FAILED,
    INTERRUPTED,
    USAGE,
    CommandError,
)
from railgun.cli.output import Output
from railgun.engine.snapshots.option_names import flags
from railgun.errors import RailgunError
from railgun.transport.registry import Registry


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command; the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    out = Output("--json" in given)
    try:
        options = parser().parse_args(given)
        with flags():  # errors name what to choose as it is typed here
            return int(options.command(options, out, Registry(options.registry)))
    except CommandError as error:
        out.error(error)
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # as when piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except RailgunError as error:
        code, kind = _in_code(error)
        out.error(CommandError(code, kind, str(error)))
        return code


def _in_code(error: RailgunError) -> tuple[int, str]:
    return error.exit_code, error.kind or type(error).__name__.removesuffix("Error").lower()


# ---------------------------------------------------------------- commands


def _run(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    from railgun.cli.run import run_flow  # a second, for what other commands do not need

    return run_flow(options, out, registry)


def _backfill(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    from railgun.cli.backfill import backfill

    return backfill(options, out, registry)


def _scale(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    client = find(options.name, registry)
    taken = client.post("/scale", workers=options.workers)
    if not options.watch:
        out.data(accepted=True, status=taken["status"])
        out.line(f"{options.name}: asked for {_workers(options.workers)}")
        return DONE
    return _watch_scale(client, taken["last_event"], options.workers, out)


def _watch_scale(client: Client, after: int, workers: int, out: Output) -> int:
    """Show how a rescale goes on, until it is over."""
    from rich.live import Live

    with Live(console=out.console, refresh_per_second=8, transient=True) as live:
        for kind, data in client.events(after):
            if kind == "happened":
                out.event(data)
                if data["kind"] == "not-rescaled":
                    return FAILED
                continue
            out.data(status=data)
            if not out.as_json:
                live.update(view.job(data))
            if data["state"] in ("starting", "rescaling"):
                continue
            if data["state"] == "running" and data["size"] == workers:
                return DONE
            raise CommandError(
                FAILED,
                "not-rescaled",
                data["cause"] or f"the flow is {data['state']} on {_workers(data['size'])}",
            )
    raise AssertionError("a stream of events ends with one")


def _pin(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    key = _key(options.key)
    taken = find(options.name, registry).post("/pin", key=key, worker=options.worker)
    out.data(accepted=True, key=key, worker=options.worker, status=taken["status"])
    out.line(f"{options.name}: key {key!r} goes to worker {options.worker}")
    return DONE


def _key(told: str) -> Any:
    """A key as it is typed: JSON if it is JSON, or else text."""
    try:
        return json.loads(told)
    except ValueError:
        return told


def _status(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    if options.name is None:
        return _all_jobs(options, out, registry)
    client = find(options.name, registry)
    if options.watch:
        return _watch_status(client, out)
    status = client.get("/status")
    out.data(status=status)
    out.show(view.job(status))
    return DONE


def _all_jobs(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    if options.watch:
        raise CommandError(USAGE, "usage", "--watch needs the name of a job")
    statuses = []
    for entry in registry.jobs():
        try:
            statuses.append(Client(entry).get("/status"))
        except CommandError as error:  # ended between two looks, or on another machine
            out.line(str(error), "yellow")
    out.listing("jobs", statuses, view.jobs, "no jobs are running")
    return DONE


def _watch_status(client: Client, out: Output) -> int:
    from rich.live import Live

    after = client.get("/status")["last_event"]
    with Live(console=out.console, refresh_per_second=8) as live:
        for kind, data in client.events(after):
            if kind == "happened":
                out.event(data)
            else:
                out.data(status=data)
                if not out.as_json:
                    live.update(view.job(data))
                if kind == "end":
                    return FAILED if data["state"] == "failed" else DONE
    raise AssertionError("a stream of events ends with one")


def _stop(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    client = find(options.name, registry)
    taken = client.post("/abort") if options.now else client.post("/stop", drain=options.drain)
    out.data(accepted=True, status=taken["status"])
    how = "ends at once" if options.now else f"stops: {taken['how']}"
    out.line(f"{options.name} {how}")
    return DONE


def _snapshot(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    from railgun.cli.snapshots import take

    return take(options, out, registry)


def _snapshots(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    from railgun.cli.snapshots import show

    return show(options, out, registry)


def _state(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    from railgun.cli.state import show

    return show(options, out, registry)


def _draw(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    from railgun.cli.loading import load

    flow = load(options.flow).flow
    if options.svg:
        Path(options.svg).write_text(flow.draw("svg"), "utf-8")
        out.data(svg=options.svg)
        out.line(f"{flow.name} is drawn in {options.svg}")
    else:
        picture = flow.draw()
        out.data(mermaid=picture)
        out.line(picture)
    return DONE


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


# ---------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong as all errors are told."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(USAGE, "usage", f"{message}; see {self.prog} --help")


def _add_running(made: argparse.ArgumentParser, flow: str) -> None:
    """What commands have in common that run a flow."""
    made.add_argument("flow", help=flow)
    made.add_argument("--workers", type=_count, default=2, metavar="N", help="at first (2)")
    made.add_argument("--master", metavar="URL", help="of Spark (default: local mode)")
    made.add_argument("--name", help="by which other commands find it (default: the flow's)")
    made.add_argument("--port", type=int, default=0, help="of the HTTP API (default: any)")
    made.add_argument(
        "--set", action="append", default=[], metavar="K=V", help="a setting of Spark; repeatable"
    )
    made.add_argument(
        "--snapshots",
        metavar="DIR",
        help="where they are kept: a directory or a URL (./railgun-snapshots)",
    )
    made.add_argument("--every", type=seconds, metavar="SECONDS", help="between two of them (10)")
    made.add_argument("--keep", type=_count_kept, metavar="N", help="how many are kept (3)")


def parser() -> argparse.ArgumentParser:
    """What can be typed."""
    main_parser = _Parser(
        prog="railgun",
        description="Streams, and stateful flows on Spark that rescale while they run.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main_parser.add_argument("--version", action="version", version=f"railgun {__version__}")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Any, what: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=what, description=what)
        made.set_defaults(command=function)
        made.add_argument("--json", action="store_true", help="one JSON object a line")
        made.add_argument("--registry", metavar="DIR", help="where jobs are found")
        return made

    flow = "module:flow, or path/file.py[:flow]"
    made = command("run", _run, "run a flow until it ends; Ctrl-C stops it, a second one at once")
    _add_running(made, flow)
    made.add_argument(
        "--from", dest="begin", metavar="SNAPSHOT",
        help="begin with this one: a number, DIR#NUMBER, or the latest in a DIR (default: the latest)",
    )  # fmt: skip
    made.add_argument("--fresh", action="store_true", help="begin with nothing; snapshots stay")
    made.add_argument(
        "--rename", action="append", default=[], metavar="OLD=NEW",
        help="a step of the snapshot has another name now; repeatable",
    )  # fmt: skip
    made.add_argument(
        "--drop-state", action="append", default=[], metavar="STEP",
        help="give up what the snapshot has of this step; repeatable",
    )  # fmt: skip
    made.add_argument(
        "--allow-older", action="store_true", help="if the latest is damaged, take the one before"
    )
    made.add_argument("--no-snapshots", action="store_true", help="take none, begin with none")

    made = command(
        "backfill",
        _backfill,
        "run a flow over its history, as a batch, and then live from there on",
    )
    _add_running(made, flow)
    made.add_argument(
        "--input", action="append", default=[], metavar="[SOURCE=]FORMAT:PATH",
        help="the history of a source: parquet:PATH, json:PATH, csv:PATH, table:NAME, …; or `source`: what the "
        "source has itself",
    )  # fmt: skip
    made.add_argument(
        "--order-by", action="append", default=[], metavar="[SOURCE=]COLUMN",
        help="the column whose order is the order of records (default: as the rows are)",
    )  # fmt: skip
    made.add_argument(
        "--at", action="append", default=[], metavar="[SOURCE:]PART=POSITION",
        help="where a source goes on live: STREAM=OFFSET, FILE=done; `start`: at its start",
    )  # fmt: skip
    made.add_argument(
        "--output", action="append", default=[], metavar="[SINK=]FORMAT:PATH",
        help="write what a sink gets of the history there, and not to the sink itself",
    )  # fmt: skip
    made.add_argument("--partitions", type=_count, metavar="N", help="to divide the keys into")
    made.add_argument("--then-live", action="store_true", help="and go on live")
    made.set_defaults(
        begin=None, fresh=False, rename=[], drop_state=[], allow_older=False, no_snapshots=False
    )

    made = command("scale", _scale, "change the number of workers while the flow runs")
    made.add_argument("name", metavar="NAME")
    made.add_argument("workers", type=_count, metavar="N")
    made.add_argument("--watch", action="store_true", help="show its progress, until it is over")

    made = command("pin", _pin, "give a key to a worker, whatever its hash says")
    made.add_argument("name", metavar="NAME")
    made.add_argument("key", metavar="KEY", help='text, or JSON: 42, "42", ["a", 1]')
    made.add_argument("worker", type=int, metavar="WORKER")

    made = command("status", _status, "how a job fares, or which jobs there are")
    made.add_argument("name", metavar="NAME", nargs="?")
    made.add_argument("--watch", action="store_true", help="go on showing it, until it ends")

    made = command(
        "stop", _stop, "end a flow with a last snapshot, or (without any) with its sources"
    )
    made.add_argument("name", metavar="NAME")
    how = made.add_mutually_exclusive_group()
    how.add_argument(
        "--drain", action="store_true", help="sources end: it has come to its end then"
    )
    how.add_argument("--now", action="store_true", help="end at once, whatever is under way")

    made = command("snapshot", _snapshot, "take a snapshot now, and wait for it")
    made.add_argument("name", metavar="NAME")
    made.add_argument("--timeout", type=seconds, metavar="SECONDS", help="wait no longer")

    made = command("snapshots", _snapshots, "which snapshots there are, and which failed")
    made.add_argument("name", metavar="NAME", nargs="?")
    made.add_argument(
        "--dir", metavar="DIR", help="look into a directory, whether the job runs or not"
    )

    made = command("state", _state, "the state of a key, or how many there are")
    made.add_argument("name", metavar="NAME", nargs="?")
    made.add_argument("--step", help="whose state")
    made.add_argument("--key", help='text, or JSON: 42, "42", ["a", 1] (default: some of them)')
    made.add_argument("--dir", metavar="DIR", help="out of a snapshot in this directory")
    made.add_argument("--snapshot", type=number, metavar="N", help="out of this one (the latest)")
    made.add_argument("--limit", type=number, metavar="N", help="keys to show (20)")
    made.add_argument(
        "--sql", metavar="SELECT", help="ask the table state (key, state, …) of a snapshot"
    )

    made = command("draw", _draw, "draw a flow")
    made.add_argument("flow", help=flow)
    made.add_argument("--svg", metavar="FILE", help="as a picture (default: Mermaid text)")

    arguments.add_streams(commands)
    arguments.add_sinks(commands)
    arguments.add_connectors(commands)
    return main_parser


def _count_kept(told: str) -> int:
    count = number(told)
    if count < 1:
        raise argparse.ArgumentTypeError("at least one snapshot is kept")
    return count


def _count(told: str) -> int:
    try:
        count = int(told)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number is expected, not {told!r}") from None
    if count < 1:
        raise argparse.ArgumentTypeError(f"a flow needs at least one worker, not {count}")
    return count
