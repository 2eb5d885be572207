"""Collect the metrics of a job: add up what workers report with every heartbeat, and format it for Prometheus.

Rules:

1. A worker counts from zero when it starts again, and some of its counts restart with every rescale. Counters that this
   module exports never fall: it adds up increases, and keeps the counts of workers that have left.
2. Gauges are exported only for present workers.
3. Label values come from users' flows, so all of them are escaped (`transport.prometheus`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from railgun.transport.prometheus import Labels, Text

STATES: Final = ("starting", "running", "rescaling", "stopping", "finished", "failed")
BY_STAGE: Final = ("records", "written", "moved", "taken", "bytes")


def nothing_moved() -> dict[str, Any]:
    """Return the figures of a rescale that has moved nothing yet."""
    return {"moved": 0, "bytes": 0, "longest_hold_ms": 0.0, "seconds": 0.0}


def progress(workers: Sequence[Mapping[str, Any]], moving: str, epoch: int) -> dict[str, Any]:
    """Return the progress of the stage whose keys are moving.

    A worker that has not begun still reports the figures of its last move, which are ignored.
    """
    figures = [
        stage
        for worker in workers
        for name, stage in worker.get("stages", {}).items()
        if name == moving and (stage["phase"] != "normal" or stage["epoch"] >= epoch)
    ]
    return {
        "moving": sum(stage["moving"] for stage in figures),
        "moved": sum(stage["moved"] for stage in figures),
        "held": sum(stage["held"] for stage in figures),
        "bytes": sum(stage["bytes"] for stage in figures),
        "longest_hold_ms": max((stage["longest_hold"] for stage in figures), default=0) / 1000,
    }


class Totals:
    """Counters that never fall, computed from counts that do.

    >>> totals = Totals()
    >>> totals.see(0, "first", {"dead_letters": 3})
    >>> totals.see(0, "first", {"dead_letters": 5})
    >>> totals.see(0, "second", {"dead_letters": 1})
    >>> list(totals.of("dead_letters"))
    [((('worker', '0'),), 6)]
    """

    def __init__(self) -> None:
        self._totals: dict[str, dict[Labels, int]] = {}
        self._last: dict[int, tuple[object, dict[tuple[str, Labels], int]]] = {}

    def see(self, worker: int, life: object, metrics: Mapping[str, Any]) -> None:
        """Add a worker's metrics; in another `life` the worker has counted from zero."""
        before, last = self._last.get(worker, (life, {}))
        if before != life:
            last = {}
        counts: dict[tuple[str, Labels], int] = {}
        for name, labels, value in _counts(worker, metrics):
            counts[name, labels] = value
            last_value = last.get((name, labels), 0)
            increase = value - last_value if value >= last_value else value
            by_labels = self._totals.setdefault(name, {})
            by_labels[labels] = by_labels.get(labels, 0) + increase
        self._last[worker] = (life, counts)

    def of(self, name: str) -> Iterator[tuple[Labels, int]]:
        """Yield the totals of one counter, by labels."""
        yield from sorted(self._totals.get(name, {}).items())


def _counts(worker: int, metrics: Mapping[str, Any]) -> Iterator[tuple[str, Labels, int]]:
    worker_label = (("worker", str(worker)),)
    for stage, figures in metrics.get("stages", {}).items():
        for name in BY_STAGE:
            yield name, (*worker_label, ("stage", stage)), figures[name]
    if "dead_letters" in metrics:
        yield "dead_letters", worker_label, metrics["dead_letters"]
    for step, count in metrics.get("errors", {}).items():
        yield "errors", (*worker_label, ("step", step)), count
    for step, listener in metrics.get("doors", {}).items():
        yield "refused", (*worker_label, ("step", step)), listener["refused"]
        yield "dropped", (*worker_label, ("step", step)), listener["dropped"]


def prometheus(status: Mapping[str, Any], totals: Totals) -> str:
    """Return the metrics of a job in Prometheus' text format."""
    text = Text((("flow", str(status["name"])),))
    text.gauge(
        "generation", "Generation of the flow: one more with every start", status["generation"]
    )
    text.gauge("uptime_seconds", "Seconds since the job was started", status["uptime"])
    text.gauge("workers_wanted", "Workers the flow should have", status["goal"])
    text.counter("failures_total", "Failures that made the flow start again or fail")
    text.add((), status["failures"])
    text.begin("state", "gauge", "1 for the state the flow is in")
    for state in STATES:
        text.add((("state", state),), int(status["state"] == state))
    text.begin("workers", "gauge", "Workers by state")
    states = [worker["state"] for worker in status["workers"]]
    for state in sorted({"running", *states}):
        text.add((("state", state),), states.count(state))
    for name, metric, help_text in (
        ("records", "records_total", "Records that came into a stage"),
        ("written", "written_total", "Records written by the sinks of a stage"),
        ("moved", "moved_keys_total", "Keys a worker gave away in rescales"),
        ("taken", "taken_keys_total", "Keys a worker took over in rescales"),
        ("bytes", "moved_bytes_total", "Bytes of state a worker gave away in rescales"),
        ("dead_letters", "dead_letters_total", "Records that became dead letters"),
        ("errors", "step_errors_total", "Records a step's function raised for"),
        (
            "refused",
            "refused_connectors_total",
            "Sessions of connectors that were ended because of an error",
        ),
        ("dropped", "dropped_messages_total", "Duplicate messages of connectors that were dropped"),
    ):
        text.counter(metric, help_text)
        for labels, total in totals.of(name):
            text.add(labels, total)
    for name, metric, help_text, scale in (
        ("keys", "keys", "Keys that have state on a worker", 1.0),
        ("moving", "moving_keys", "Keys a worker gives away in the present or last rescale", 1.0),
        ("held", "held_records", "Records that wait for their key's state", 1.0),
        ("longest_hold", "longest_hold_seconds",
         "Longest time state was in transit in the present or last rescale", 1e-6),
    ):  # fmt: skip
        text.begin(metric, "gauge", help_text)
        for worker in status["workers"]:
            for stage, figures in worker.get("stages", {}).items():
                labels = (("worker", str(worker["worker"])), ("stage", stage))
                value = figures[name]
                text.add(labels, value if scale == 1.0 else value * scale)
    for name, metric, help_text in (
        ("unsent", "unsent_bytes", "Bytes that wait in the fullest link of a worker"),
        ("resting", "resting", "1 while the sources of a worker pause because of back-pressure"),
    ):
        text.begin(metric, "gauge", help_text)
        for worker in status["workers"]:
            if name in worker:
                text.add((("worker", str(worker["worker"])),), int(worker[name]))
    text.begin("streams", "gauge", "Known streams of connectors")
    for step, count in status.get("streams", {}).items():
        text.add((("step", step),), count)
    text.begin("connectors", "gauge", "Connectors that are connected to a worker")
    for worker in status["workers"]:
        for step, listener in worker.get("doors", {}).items():
            labels = (("worker", str(worker["worker"])), ("step", step))
            text.add(labels, listener["connectors"])
    if status.get("snapshots") is not None:
        _add_snapshots(text, status["snapshots"])
    return str(text)


def _add_snapshots(text: Text, snapshots: Mapping[str, Any]) -> None:
    text.counter("snapshots_total", "Snapshots that were committed")
    text.add((), snapshots["count"])
    text.counter("snapshot_failures_total", "Snapshots that failed")
    text.add((), snapshots["failures"])
    text.begin("snapshot_running", "gauge", "1 while a snapshot is being taken")
    text.add((), int(snapshots["under_way"] is not None))
    last = snapshots["last"]
    for name, metric, help_text in (
        ("age", "snapshot_age_seconds", "Seconds since the last snapshot was committed"),
        ("seconds", "snapshot_duration_seconds", "Seconds the last snapshot took"),
        ("size", "snapshot_written_bytes", "Bytes that were written for the last snapshot"),
        ("total", "snapshot_bytes", "Bytes of all files the last snapshot is made of"),
        ("rows", "snapshot_rows", "Keys that were saved with the last snapshot"),
    ):
        text.begin(metric, "gauge", help_text)
        if last is not None:
            text.add((), last[name])
