"""`railgun backfill`: run a flow over its history as a Spark batch job, and then, with `--then-live`, live."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from railgun.cli.arguments import add_running, positive
from railgun.cli.commands.run import DEFAULT_DIRECTORY, settings_of
from railgun.cli.commands.run import execute as run_flow
from railgun.cli.errors import DONE, USAGE, CommandError
from railgun.cli.loading import Loaded, load
from railgun.cli.output import Output, brief
from railgun.flows.flow import Flow
from railgun.flows.plan import DEAD
from railgun.flows.source import is_empty
from railgun.sources.streams import Streams
from railgun.transport.registry import Registry

if TYPE_CHECKING:
    from railgun.spark.batch import BatchResult
    from railgun.spark.inputs import Input
    from railgun.spark.session import DataFrame, SparkSession

READ_OPTIONS = {"csv": {"header": "true", "inferSchema": "true"}}
FormatsAndPaths = dict[str, tuple[str, str]]
"""A format and a path, by the name of a source or sink."""


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Run a flow over its history, save its state as a snapshot, and continue live if asked to."""
    loaded = load(options.flow)
    flow = loaded.flow
    flow.plan()
    names = [step.name for step in flow.steps.values() if step.kind == "source"]
    inputs = _inputs(options.input, names)
    order = _by_source(options.order_by, names, "--order-by")
    positions = _positions(flow, options.at, names, [n for n, (how, _) in inputs.items() if how])
    for name, (how, _) in inputs.items():
        if not how and (name in order or name in positions):
            raise _usage(
                f"--input {name}=source reads the source itself, in its own order and positions: leave out "
                "--order-by and --at"
            )
    outputs = _outputs(options.output, flow)
    code = _run(options, out, loaded, inputs, order, positions, outputs)
    if code != DONE or not options.then_live:
        return code
    return run_flow(options, out, registry)


def _run(
    options: argparse.Namespace,
    out: Output,
    loaded: Loaded,
    inputs: FormatsAndPaths,
    order: dict[str, str],
    positions: dict[str, dict[Any, Any]],
    outputs: FormatsAndPaths,
) -> int:
    # Imported here: this takes a second, and other commands do not need Spark.
    from railgun.spark.batch import Prepared
    from railgun.spark.progress import watched
    from railgun.spark.session import opened

    flow = loaded.flow
    where = options.snapshots or DEFAULT_DIRECTORY
    # As many tasks at once as there are cores: unlike workers, tasks of a batch do not wait for each other.
    master = options.master or f"local[{os.cpu_count() or 1}]"
    conf = settings_of(options.set)
    out.line(f"{flow.name}: its history, on {options.master or 'local Spark'}")
    with opened(f"{flow.name} backfill", master, conf=conf) as spark:
        tables = {
            name: _input(spark, name, how, path, order, positions)
            for name, (how, path) in inputs.items()
        }
        prepared = Prepared.of(flow, spark, tables, options.partitions, loaded.modules)
        into = prepared.checked_into(sink for sink in prepared.sinks if sink not in outputs)

        def write(result: BatchResult) -> None:
            for sink, (how, path) in outputs.items():
                result[sink].write.format(how).save(path)

        with _progress_display(out) as show, watched(spark, show):
            began = time.monotonic()
            result = prepared.save({}, where, into, job=options.name, before=write)
        result.unpersist()
        took = time.monotonic() - began
    out.data(backfill={"snapshot": result.snapshot, "where": where, "seconds": round(took, 3)})
    out.line(
        f"done in {brief(took)}: snapshot {result.snapshot} in {where}"
        + ("" if options.then_live else f"; {_run_again(options)} goes on from there"),
        "green",
    )
    return DONE


def _run_again(options: argparse.Namespace) -> str:
    options_given = {
        "--snapshots": options.snapshots,
        "--name": options.name,
        "--master": options.master,
    }
    return " ".join(
        [
            "railgun run",
            options.flow,
            *(f"{name} {value}" for name, value in options_given.items() if value),
        ]
    )


@contextmanager
def _progress_display(out: Output) -> Iterator[Any]:
    """Show how many tasks are done: a bar for people, a line now and then for programs."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if out.as_json:
        yield lambda progress_data: out.data(progress=progress_data)
        return
    if not out.console.is_interactive:  # a removed bar would leave an empty line
        yield lambda progress_data: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out.console, transient=True) as progress:
        bar = progress.add_task("starting", total=None)
        yield lambda progress_data: progress.update(
            bar,
            description=progress_data["what"],
            completed=progress_data["done"],
            total=progress_data["tasks"],
        )


# ---------------------------------------------------------------- arguments


def _inputs(arguments: Sequence[str], names: Sequence[str]) -> FormatsAndPaths:
    """Parse `[SOURCE=]FORMAT:PATH`, or `[SOURCE=]source`, whose format is empty."""
    places: FormatsAndPaths = {}
    for argument in arguments:
        name, rest = _split(argument, names, "--input")
        if name in places:
            raise _usage(f"--input: source {name!r} is given twice")
        how, colon, path = rest.partition(":")
        if rest == "source":
            places[name] = "", ""
        elif colon and how and path:
            places[name] = how, path
        else:
            raise _usage(f"--input takes FORMAT:PATH, as parquet:history/, or source, not {rest!r}")
    missing = [name for name in names if name not in places]
    if missing:
        raise _usage(
            f"source {missing[0]!r} has no input: --input {missing[0]}=parquet:PATH, or "
            f"--input {missing[0]}=source to read the source itself"
        )
    return places


def _outputs(arguments: Sequence[str], flow: Flow) -> FormatsAndPaths:
    sinks = [step.name for step in flow.steps.values() if step.kind == "sink"]
    sinks += [] if flow.dead_letters is None else [DEAD]
    places: FormatsAndPaths = {}
    for argument in arguments:
        name, rest = _split(argument, sinks, "--output", "sink")
        how, colon, path = rest.partition(":")
        if not colon or not how or not path:
            raise _usage(f"--output takes [SINK=]FORMAT:PATH, as parquet:totals/, not {argument!r}")
        if name in places:
            raise _usage(f"--output: sink {name!r} is given twice")
        places[name] = how, path
    return places


def _split(
    argument: str, names: Sequence[str], option: str, kind: str = "source"
) -> tuple[str, str]:
    """Split `NAME=VALUE`; the name may be left out if there is only one."""
    name, equals, rest = argument.partition("=")
    if equals and ":" not in name:
        if name not in names:
            raise _usage(f"{option}: the flow has no {kind} {name!r}, only {', '.join(names)}")
        return name, rest
    if len(names) != 1:
        raise _usage(
            f"{option} of which {kind}? {option} NAME={argument}; there are {', '.join(names)}"
        )
    return names[0], argument


def _by_source(arguments: Sequence[str], names: Sequence[str], option: str) -> dict[str, str]:
    places: dict[str, str] = {}
    for argument in arguments:
        name, rest = _split(argument, names, option)
        if name in places:
            raise _usage(f"{option}: source {name!r} is given twice")
        places[name] = rest
    return places


def _positions(
    flow: Flow, arguments: Sequence[str], names: Sequence[str], tables: Sequence[str]
) -> dict[str, dict[Any, Any]]:
    """Parse `[SOURCE:]PART=POSITION`, or `[SOURCE:]POSITION` for a source with one part.

    The position `start` means that none of the source is in its table.
    """
    positions: dict[str, dict[Any, Any]] = {}
    for argument in arguments:
        name, colon, rest = argument.partition(":")
        if not colon or name not in names:
            if len(names) != 1:
                raise _usage(
                    f"--at of which source? --at NAME:{argument}; there are {', '.join(names)}"
                )
            name, rest = names[0], argument
        parts = positions.setdefault(name, {})
        if rest == "start":
            continue
        part, equals, position = rest.rpartition("=")
        if equals:
            _check_part(flow, name, part)
        else:
            part = _only_part(flow, name, rest)
        if part in parts:
            raise _usage(f"--at: part {part!r} of source {name!r} is given twice")
        parts[part] = _position(flow, name, part, position)
    for name in tables:
        if name not in positions:
            if is_empty(flow.steps[name].options["source"]):
                positions[name] = {}
                continue
            raise _usage(
                f"where does source {name!r} continue live, after its table? --at {name}:PART=POSITION (of a stream: "
                f"its name and an offset; of a file: its name and done), or --at {name}:start if the table has none "
                f"of its data"
            )
    return positions


def _check_part(flow: Flow, name: str, part: str) -> None:
    """Refuse a stream that the source does not read: the intended one would be read from its start."""
    source = flow.steps[name].options["source"]
    if isinstance(source, Streams) and not any(
        fnmatchcase(part, pattern) for pattern in source.names
    ):
        raise _usage(f"--at: source {name!r} has no part {part!r}, only {', '.join(source.names)}")


def _only_part(flow: Flow, name: str, argument: str) -> Any:
    parts: tuple[str, ...] = getattr(flow.steps[name].options["source"], "names", ())
    if len(parts) != 1 or any(letter in parts[0] for letter in "*?["):
        raise _usage(
            f"--at {argument}: of which part of source {name!r}? --at {name}:PART={argument}"
        )
    return parts[0]


def _position(flow: Flow, name: str, part: Any, argument: str) -> Any:
    from railgun.spark.inputs import DONE as READ_TO_ITS_END

    if argument == "done":
        return READ_TO_ITS_END
    if argument == "end":
        ends = getattr(flow.steps[name].options["source"].as_of_now(), "ends", None) or {}
        if part not in ends:
            raise _usage(f"--at: source {name!r} does not know where {part!r} ends")
        return ends[part]
    try:
        return json.loads(argument)
    except ValueError:
        raise _usage(f"--at: a position is a number, done, end or JSON, not {argument!r}") from None


def _input(
    spark: SparkSession,
    name: str,
    how: str,
    path: str,
    order: dict[str, str],
    positions: dict[str, dict[Any, Any]],
) -> Input:
    from railgun.spark.inputs import OWN, Input

    if not how:
        return Input(OWN)
    return Input(_table(spark, name, how, path), order.get(name), positions=positions[name])


def _table(spark: SparkSession, name: str, how: str, path: str) -> DataFrame:
    try:
        if how == "table":
            return spark.table(path)
        return spark.read.options(**READ_OPTIONS.get(how, {})).format(how).load(path)
    except Exception as error:
        reason = str(error).split("\n", 1)[0]
        raise CommandError(
            USAGE, "no-input", f"--input {name}={how}:{path} cannot be read: {reason}"
        ) from error


def _usage(what: str) -> CommandError:
    return CommandError(USAGE, "usage", what)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flow, how it runs, and its history."""
    add_running(parser)
    parser.add_argument(
        "--input", action="append", default=[], metavar="[SOURCE=]FORMAT:PATH",
        help="history of a source: parquet:PATH, json:PATH, csv:PATH, table:NAME, …; or `source`: read the source "
        "itself; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--order-by", action="append", default=[], metavar="[SOURCE=]COLUMN",
        help="column that gives the order of records (default: the order of the rows); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--at", action="append", default=[], metavar="[SOURCE:]PART=POSITION",
        help="position at which a source continues live: STREAM=OFFSET, FILE=done, or `start`; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--output", action="append", default=[], metavar="[SINK=]FORMAT:PATH",
        help="write the results of a sink to this place instead of to the sink; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--partitions", type=positive, metavar="N",
        help="number of partitions to divide the keys into (default: chosen by Spark)",
    )  # fmt: skip
    parser.add_argument(
        "--then-live", action="store_true", help="continue as a live flow where the history ends"
    )
    parser.set_defaults(
        begin=None, fresh=False, rename=[], drop_state=[], allow_older=False, no_snapshots=False
    )
