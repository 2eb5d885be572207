"""Draw the status of jobs, snapshots and state for people."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from railgun.cli.output import STYLES, brief, duration, size

Status = dict[str, Any]
PHASES = ("align", "cut", "encode", "write")
OUTCOMES = {
    "committed": "green",
    "failed": "red",
    "aborted": "yellow",
    "running": "cyan",
    "dropped": "dim",  # committed, and deleted since
}
WIDE_COLUMNS = 112
"""Columns of a terminal from which on the phases of snapshots have columns of their own."""


def jobs(statuses: Sequence[Status]) -> RenderableType:
    """Draw a table with a row for each job."""
    table = Table()
    for column, justify in (
        ("job", "left"), ("state", "left"), ("workers", "right"), ("records", "right"),
        ("keys", "right"), ("up", "right"), ("failures", "right"),
    ):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for status in statuses:
        table.add_row(
            Text(status["name"]),
            Text(status["state"], STYLES.get(status["state"], "")),
            _size_of(status),
            f"{_sum(status, 'records'):,}",
            f"{_sum(status, 'keys'):,}",
            duration(status["uptime"]),
            str(status["failures"]),
        )
    return table


def job(status: Status) -> RenderableType:
    """Draw a job: its state, its workers, and the progress of a rescale."""
    head = Text.assemble(
        (status["name"], "bold"),
        "  ",
        (status["state"], STYLES.get(status["state"], "")),
        f"  {_size_of(status)} workers, up {duration(status['uptime'])}, "
        f"generation {status['generation']}, failures {status['failures']}",
    )
    parts: list[RenderableType] = [head]
    for step, streams in status.get("streams", {}).items():
        listeners = [worker.get("doors", {}).get(step, {}) for worker in status["workers"]]
        connectors = sum(listener.get("connectors", 0) for listener in listeners)
        summary = f"{step}: {connectors} connector{'s' * (connectors != 1)}, {streams:,} streams"
        parts.append(Text(summary, "dim"))
    if status["cause"]:
        parts.append(Text(status["cause"], "red"))
    if status.get("snapshots") is not None:
        parts.append(_snapshot_summary(status["snapshots"]))
    if status["moving"] is not None:
        parts.append(moves(status))
    parts.append(_workers(status))
    return Group(*parts)


def moves(status: Status) -> RenderableType:
    """Draw the progress of a rescale: the stage, a bar of moved keys, and the records held."""
    stages = status["stages"]
    moving, progress = status["moving"], status["progress"]
    grid = Table.grid(padding=(0, 1))
    total = progress["moving"]
    bar = ProgressBar(total=max(1, total), completed=progress["moved"] if total else 0, width=40)
    words = (
        f"{progress['moved']:,}/{total:,} keys, {progress['held']:,} records held, "
        f"{size(progress['bytes'])}, longest hold {progress['longest_hold_ms']:.1f} ms"
    )
    name = Text(f"stage {stages.index(moving) + 1} of {len(stages)}, {moving}")
    grid.add_row(name, bar, Text(words))
    return grid


def _snapshot_summary(snapshots: dict[str, Any]) -> RenderableType:
    """Describe the last snapshot, the current one, and the last failure."""
    text = Text("snapshots: ")
    last, now, failed = snapshots["last"], snapshots["under_way"], snapshots["last_failure"]
    if last is None:
        text.append("none yet")
    else:
        text.append(
            f"{last['snapshot']} was committed {duration(last['age'])} ago "
            f"({size(last['total'])}, took {brief(last['seconds'])})"
        )
    if now is not None:
        text.append(f"; {now['snapshot']} is {now['phase']} for {brief(now['seconds'])}", "cyan")
    if snapshots["failures"]:
        text.append(
            f"; {snapshots['failures']} failed, last {failed['snapshot']}: {failed['why']}",
            "yellow",
        )
    return text


def phases(seconds: dict[str, float]) -> str:
    """Describe how long each phase of a snapshot took.

    >>> phases({"write": 0.12, "align": 0.003, "cut": 0.0001, "encode": 1.5})
    'align 3.0 ms, cut 0.1 ms, encode 1.5 s, write 120 ms'
    """
    names = [*PHASES, *(name for name in seconds if name not in PHASES)]
    return ", ".join(f"{name} {brief(seconds[name])}" for name in names if name in seconds)


def snapshots(attempts: Sequence[dict[str, Any]], width: int = WIDE_COLUMNS) -> RenderableType:
    """Draw a table of committed and failed snapshots; in a narrow terminal their phases stand below each other."""
    wide = width >= WIDE_COLUMNS
    shown = PHASES if wide else ()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column, justify in (
        ("id", "right"), ("state", "left"), ("kind", "left"), ("when", "left"), ("took", "right"),
        *((phase, "right") for phase in shown), ("rows", "right"), ("size", "right"),
    ):  # fmt: skip
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("why")
    for attempt in attempts:
        done, took = attempt["state"] == "committed", attempt["phases"]
        state = "dropped" if done and not attempt["kept"] else attempt["state"]
        ended = (
            "" if attempt["ended"] is None else brief(max(0.0, attempt["ended"] - attempt["began"]))
        )
        why = [attempt["error"] or attempt["why"] or ""]
        if took and not wide:
            why.append(phases(took))
        table.add_row(
            str(attempt["snapshot"]),
            Text(state, OUTCOMES.get(state, "")),
            "full" if attempt["full"] else "incremental" if wide else "incr.",
            _when(attempt["began"]),
            ended,
            *(brief(took[phase]) if phase in took else "" for phase in shown),
            f"{attempt['rows']:,}" if done else "",
            size(attempt["size"]) if done else "",
            Text("\n".join(filter(None, why))),
        )
    return table


def _when(seconds: float) -> str:
    """Format a time; the day is left out if it is today."""
    at, now = time.localtime(seconds), time.localtime()
    same_day = time.strftime("%F", at) == time.strftime("%F", now)
    return time.strftime("%T" if same_day else "%F %T", at) if seconds else ""


def keys(summary: dict[str, Any]) -> RenderableType:
    """Draw how many keys of a step each worker has, with samples."""
    table = Table(title=f"{summary['step']}: {summary['keys']:,} keys", title_justify="left")
    table.add_column("worker", justify="right")
    table.add_column("keys", justify="right")
    table.add_column("samples")
    for worker in summary["workers"]:
        samples = Text(", ".join(map(typed, worker["samples"])))
        table.add_row(str(worker["worker"]), f"{worker['keys']:,}", samples)
    return table


def rows(keys: Sequence[dict[str, Any]]) -> RenderableType:
    """Draw keys of a snapshot with their states."""
    cells = [
        (typed(key["key"]), json.dumps(key["state"], ensure_ascii=False), key["saved"])
        if "state" in key
        else (typed(key["key"]), key["repr"], key["saved"])
        for key in keys
    ]
    return table(["key", "state", "saved in"], cells)


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> RenderableType:
    """Draw a table of rows; values other than text are shown as JSON."""
    table = Table()
    for name in names:
        table.add_column(Text(name))
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def typed(key: Any) -> str:
    """Format a key as it is typed on the command line.

    >>> print(typed("ada"), typed("42"), typed(42), typed(["a", 1]))
    ada "42" 42 ["a", 1]
    """
    if isinstance(key, str):
        try:
            json.loads(key)
        except (ValueError, RecursionError):
            return key
    return json.dumps(key, ensure_ascii=False, default=repr)


def _cell(value: Any) -> Text:
    if isinstance(value, str):
        return Text(value)
    return Text(json.dumps(value, ensure_ascii=False, default=repr))


def _workers(status: Status) -> Table:
    table = Table()
    for column, justify in (
        ("worker", "right"), ("state", "left"), ("process", "left"), ("stage", "left"),
        ("records", "right"), ("keys", "right"), ("keys moved", "right"), ("records held", "right"),
        ("bytes unsent", "right"),
    ):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for worker in status["workers"]:
        state = worker["state"] + (", resting" if worker.get("resting") else "")
        process = f"{worker['pid']} on {worker['machine']}" if worker["pid"] else ""
        first: list[RenderableType] = [str(worker["worker"]), Text(state), Text(process)]
        unsent = size(worker.get("unsent", 0))
        for stage, figures in worker.get("stages", {}).items() or [("", None)]:
            cells = ["", "", "", ""]
            if figures is not None:
                cells = [f"{figures[name]:,}" for name in ("records", "keys", "moved", "held")]
            table.add_row(*first, Text(stage), *cells, unsent)
            first, unsent = ["", "", ""], ""
    return table


def _size_of(status: Status) -> str:
    now, goal = status["size"], status["goal"]
    return str(now) if now == goal else f"{now} → {goal}"


def _sum(status: Status, name: str) -> int:
    return sum(
        figures[name]
        for worker in status["workers"]
        for figures in worker.get("stages", {}).values()
    )
