"""Pictures of a job's status, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from railgun.cli.output import STYLES, duration, size

Status = dict[str, Any]


def jobs(statuses: Sequence[Status]) -> RenderableType:
    """All jobs."""
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
    """One job, with its workers, and how far its rescale has come."""
    head = Text.assemble(
        (status["name"], "bold"),
        "  ",
        (status["state"], STYLES.get(status["state"], "")),
        f"  {_size_of(status)} workers, up {duration(status['uptime'])}, "
        f"generation {status['generation']}, failures {status['failures']}",
    )
    parts: list[RenderableType] = [head]
    if status["cause"]:
        parts.append(Text(status["cause"], "red"))
    if status["moving"] is not None:
        parts.append(moves(status))
    parts.append(_workers(status))
    return Group(*parts)


def moves(status: Status) -> RenderableType:
    """How far the rescale has come."""
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


def _workers(status: Status) -> Table:
    table = Table()
    for column, justify in (
        ("worker", "right"), ("state", "left"), ("process", "left"), ("stage", "left"),
        ("records", "right"), ("keys", "right"), ("moved", "right"), ("held", "right"),
        ("unsent", "right"),
    ):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for worker in status["workers"]:
        state = worker["state"] + (", resting" if worker.get("resting") else "")
        process = f"{worker['pid']} on {worker['machine']}" if worker["pid"] else ""
        first: list[RenderableType] = [str(worker["worker"]), Text(state), Text(process)]
        unsent = size(worker.get("unsent", 0))
        for stage, figures in worker.get("stages", {}).items() or [("", None)]:
            told = ["", "", "", ""]
            if figures is not None:
                told = [f"{figures[name]:,}" for name in ("records", "keys", "moved", "held")]
            table.add_row(*first, Text(stage), *told, unsent)
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
