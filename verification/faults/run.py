"""Run nodes, clients and faults together for some time; then heal everything, and check what the clients saw.

Rules:

1. Everything of a run is in its directory: histories, logs and data of nodes. A sound run deletes all of it, an unsound
   one keeps it, and `python -m verification.faults check` checks its history again.
2. Everything is bounded: nodes that do not form a cluster, faults that cannot be healed and groups that do not finish
   in time are failures of the run.
3. A run without faults proves nothing, and fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from railgun.client.errors import StreamsError
from railgun.errors import RailgunError
from verification.faults import flows
from verification.faults.anomalies import ALLOWED, MEANINGS, Findings
from verification.faults.blows import ProbingAdmin, RealStriker
from verification.faults.checker import check, is_sound
from verification.faults.history import Drain, Fault, History, LastRead, Meta, Publish
from verification.faults.nemesis import SETTLE, Blow, Kind, Nemesis, longest_hold, plan
from verification.faults.nodes import Nodes
from verification.faults.workload import GROUPS, STREAMS, Load, Workload
from verification.report import Report

FORM_TIMEOUT_S: Final = 60.0
"""Seconds in which nodes must have formed a cluster."""
DRAIN_TIMEOUT_S: Final = 60.0
"""Seconds for groups to finish everything, once all faults are healed."""
READ_TIMEOUT_S: Final = 60.0
"""Seconds to read all of a node at the end."""
CLIENT_LOOP_S: Final = 1.0
"""Seconds a client may take to process a delivery."""
HISTORY: Final = "history.jsonl"


@dataclass(frozen=True, slots=True)
class Run:
    """The settings of a run."""

    directory: Path
    seed: int = 1
    nodes: int = 3
    seconds: float = 30.0
    kinds: Collection[Kind] | None = None
    load: Load = field(default_factory=Load)
    settle: float = SETTLE
    drain: float = DRAIN_TIMEOUT_S
    clustered: bool | None = None
    """Whether nodes know of each other; None: if there are several."""


@dataclass(slots=True)
class Outcome:
    """The results of a run."""

    run: Run
    findings: Findings = field(default_factory=Findings)
    done: Counter[str] = field(default_factory=Counter)
    """Applied blows, by kind."""
    left_out: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Outcomes of the clients' calls."""
    acknowledged: int = 0
    records: int = 0
    failures: list[str] = field(default_factory=list)
    """Failures other than anomalies."""
    logs: str = ""

    @property
    def sound(self) -> bool:
        """Return whether nothing failed and no anomaly was found."""
        return is_sound(self.findings) and not self.failures

    def check(self, report: Report) -> None:
        """Add the results to a report."""
        name = f"{self.run.nodes} nodes, seed {self.run.seed}"
        anomalies = sum(n for kind, n in self.findings.counts.items() if kind not in ALLOWED)
        report.check(f"{name}: blows", sum(self.done.values()))
        report.check(
            f"{name}: acknowledged", self.acknowledged, "messages", "> 0", self.acknowledged > 0
        )
        report.check(f"{name}: records", self.records)
        if lost := self.findings.counts["lost_master"]:
            report.check(f"{name}: lost, acknowledged by a master alone", lost)
        report.check(f"{name}: anomalies", anomalies, "", "= 0", anomalies == 0)
        failures = [failure for failure in self.failures if failure != NOTHING]
        text = "; ".join(failures) or "none"
        report.check(f"{name}: failures", text, "", "none", not failures)

    def tell(self, say: Callable[[str], object]) -> None:
        """Print what was done and found, for people."""
        say(f"blows: {dict(sorted(self.done.items()))}, left out: {self.left_out}")
        say(f"clients: {dict(sorted(self.counts.items()))}")
        for kind, count in sorted(self.findings.counts.items()):
            say(f"{count} x {kind}: {MEANINGS[kind]}")
        for anomaly in self.findings.found[:20]:
            say(f"  {anomaly}")
        for failure in self.failures:
            say(f"failure: {failure}")


NOTHING: Final = "nothing was acknowledged"


def perform(run: Run, say: Callable[[str], object] = lambda text: None) -> Outcome:
    """Perform a run. The directory of an unsound run is kept."""
    return asyncio.run(performed(run, say))


async def performed(run: Run, say: Callable[[str], object] = lambda text: None) -> Outcome:
    """Perform a run within an event loop, as `perform` does."""
    outcome = Outcome(run)
    nodes = Nodes(run.directory, run.nodes, run.seed, run.clustered)
    history = History(run.directory / HISTORY)
    try:
        await _whole(run, nodes, history, outcome, say)
    except (RailgunError, OSError, TimeoutError) as error:
        outcome.failures.append(f"{type(error).__name__}: {error}")
    finally:
        outcome.failures += [f"{name} ended by itself" for name in nodes.died]
        for name, count in nodes.tracebacks.items():
            outcome.failures.append(f"{name} wrote {count} tracebacks: see {nodes[name].log}")
        outcome.logs = nodes.log_ends()
        await nodes.stop()
        history.close()
    outcome.records = len(history.records)
    outcome.findings = await asyncio.to_thread(check, history.records)
    outcome.acknowledged = sum(
        publish.outcome == "ok" for publish in history.records if isinstance(publish, Publish)
    )
    if not outcome.acknowledged:
        outcome.failures.append(NOTHING)
    if outcome.sound:
        shutil.rmtree(run.directory)
    return outcome


async def _whole(
    run: Run, nodes: Nodes, history: History, outcome: Outcome, say: Callable[[str], object]
) -> None:
    blows = plan(run.seed, nodes.names, run.seconds, run.kinds)
    history.add(
        Meta(
            run.seed,
            run.nodes,
            run.seconds,
            CLIENT_LOOP_S + longest_hold(blows),
            patience_s=run.load.patience_s,
        )
    )
    say(f"starting {run.nodes} nodes")
    await nodes.start()
    admin = ProbingAdmin(nodes)
    if not await _settled(admin, nodes.names, FORM_TIMEOUT_S):
        outcome.failures.append(f"the nodes do not work together after {FORM_TIMEOUT_S:g} s")
        return
    workload = Workload(nodes, history, run.seed, run.load)
    await workload.prepare()
    admin.streams += STREAMS
    if run.load.flows:
        await flows.prepare(workload)
        admin.streams += flows.TARGETS
    striker = RealStriker(nodes, admin, Random(run.seed), history)
    nemesis = Nemesis(blows, nodes.names, striker, admin, history, clients_at=workload.clients_at)
    nemesis.settle = run.settle
    say(f"{len(blows)} blows in {run.seconds:g} s")
    workload.start()
    flows.start(workload)
    try:
        await _storm(run, nemesis, outcome)
        say("healed; groups get done what is left")
        await workload.stop_publishing()
        if not await _settled(admin, nodes.names, run.settle):
            outcome.failures.append(f"not all nodes have caught up after {run.settle:g} s")
        await _drain(run, nodes, history, outcome)
        workload.check()
    finally:
        await workload.stop()
        outcome.counts = workload.counts
        outcome.failures += workload.troubles
        _note(nemesis, outcome, blows)
    say("the last look at each node")
    await asyncio.gather(*(_read_all(nodes, name, history, outcome) for name in nodes.names))


async def _storm(run: Run, nemesis: Nemesis, outcome: Outcome) -> None:
    begin = time.monotonic()
    most = run.seconds + 3 * run.settle
    try:
        async with asyncio.timeout(most):
            await nemesis.run()
    except TimeoutError:
        outcome.failures.append(f"the faults are not over after {most:g} s")
    except ExceptionGroup as errors:
        ours, others = errors.split((RailgunError, OSError))
        if others is not None:
            raise others from errors
        outcome.failures += [
            f"a blow failed: {exception}" for exception in (ours or errors).exceptions
        ]
    await asyncio.sleep(max(0.0, begin + run.seconds - time.monotonic()))


def _note(nemesis: Nemesis, outcome: Outcome, blows: Sequence[Blow]) -> None:
    outcome.done = Counter(blow.kind for blow in nemesis.done)
    outcome.left_out = len(nemesis.left_out)
    outcome.failures += [f"nodes have not caught up after {blow}" for blow in nemesis.unsettled]


async def _settled(admin: ProbingAdmin, names: Sequence[str], seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not await admin.settled(names):
                await asyncio.sleep(0.1)
            return True
    return False


async def _drain(run: Run, nodes: Nodes, history: History, outcome: Outcome) -> None:
    """Wait until the groups have finished; record their state then, or when the time was up."""
    begin = time.monotonic()
    last: dict[tuple[str, str], tuple[int, int]] = {}
    groups = [*GROUPS, *(flows.TARGET_GROUPS if run.load.flows else ())]
    names = nodes.names
    turn = 0
    while time.monotonic() < begin + run.drain:
        try:
            async with await nodes[names[turn % len(names)]].connect(3.0, direct=True) as client:
                for stream, group in groups:
                    status = await client.group(stream, group)
                    last[stream, group] = (int(status["floor"]), int(status["end"]))
        except (StreamsError, OSError):
            turn += 1
        if len(last) == len(groups) and all(floor >= end for floor, end in last.values()):
            break
        await asyncio.sleep(0.25)
    now = time.monotonic()
    for stream, group in groups:
        if (stream, group) in last:
            history.add(Drain(stream, group, begin, now, *last[stream, group]))
        else:
            outcome.failures.append(f"nobody tells how group {group} of {stream} stands")
    history.add(Fault(now, "drained"))


async def _read_all(nodes: Nodes, name: str, history: History, outcome: Outcome) -> None:
    """Record all messages that a node has."""
    try:
        async with (
            asyncio.timeout(READ_TIMEOUT_S),
            await nodes[name].connect(10.0, direct=True) as client,
        ):
            for stream in (*STREAMS, *(flows.TARGETS if outcome.run.load.flows else ())):
                offsets: list[int] = []
                values: list[str] = []
                end = int((await client.describe(stream))["end"])
                if end:
                    async with await client.subscribe(stream) as sub:
                        while not offsets or offsets[-1] + 1 < end:
                            for message in await sub.batch(1000, timeout=10.0):
                                offsets.append(message.offset)
                                values.append(message.payload.decode(errors="replace"))
                history.add(LastRead(name, stream, offsets, values))
    except (StreamsError, OSError, TimeoutError) as error:
        outcome.failures.append(f"{name} cannot be read to its end: {error or 'no answer'}")
