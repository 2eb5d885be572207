"""Track the streams that connectors push, over all workers: one registry (`engine.protocol.ingest`) for each source.

This is part of the ledger: it follows generations, snapshots, and workers that join and leave. With the position of a
stream it keeps the stream's watermark (`reached`), so that the same messages are late whichever worker receives them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from railgun.engine.protocol.frontier import MIN
from railgun.engine.protocol.ingest.messages import FromRegistry, Grant, Hasten, Owner, Reject, Want
from railgun.engine.protocol.ingest.registry import Active, Registry
from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.placement import Worker
from railgun.engine.snapshots.manifest import Manifest
from railgun.engine.worker import control_messages as control
from railgun.flows.plan import Plan

ByStream: TypeAlias = dict[str, dict[str, int]]
"""By step and stream: its position, or its watermark."""
_LOG: Final = logging.getLogger(__name__)


class Feeds:
    """The streams of a job that connectors push."""

    def __init__(self, plan: Plan) -> None:
        self.registries = {step: Registry() for step in plan.pushed}
        self._reached: ByStream = {step: {} for step in plan.pushed}
        """Watermarks: present ones of streams that no worker has, of others those at the time they were granted."""

    def go_back(self, generation: int, begun: Manifest | None, members: Iterable[Owner]) -> None:
        """Begin a generation with the streams of a snapshot; None: with no streams."""
        owners = list(members)
        for step, registry in self.registries.items():
            registry.go_back(
                generation, {} if begun is None else begun.streams.get(step, {}), owners
            )
            self._reached[step] = {} if begun is None else dict(begun.reached.get(step, {}))

    def joined(self, owner: Owner) -> None:
        """Add a worker to all registries."""
        for registry in self.registries.values():
            registry.joined(owner)

    def left(self, owner: Owner, report: o.Farewell) -> None:
        """Remove a worker, and keep the positions and watermarks of its last report."""
        positions, reached = dict(report.streams), dict(report.reached)
        for step, registry in self.registries.items():
            for stream in self._owned(registry, owner):
                self._note(step, stream, reached.get(step, {}).get(stream, MIN))
            registry.left(owner, report.generation, positions.get(step, {}))

    @staticmethod
    def _owned(registry: Registry, owner: Owner) -> list[str]:
        return [
            name
            for name, stream in registry.streams.items()
            if isinstance(stream, Active) and stream.owner == owner
        ]

    def _note(self, step: str, stream: str, reached: int) -> None:
        """Remember the watermark of a stream; it never goes back within a generation."""
        if reached > self._reached[step].get(stream, MIN):
            self._reached[step][stream] = reached

    def heard(
        self, owner: Owner, report: control.Asked | control.Relinquished
    ) -> tuple[list[tuple[Worker, control.Streams]], bool]:
        """Handle a worker's request for a stream, or its return of one.

        Return the answers to send, by worker, and whether a snapshot should be taken soon.
        """
        registry = self.registries[report.step]
        if isinstance(report, control.Relinquished):
            stream = registry.streams.get(report.stream)
            if not isinstance(stream, Active) or stream.owner != owner:
                _LOG.info("worker %s gives back %r, which it does not have", owner, report.stream)
            elif report.generation == registry.generation:
                self._note(report.step, report.stream, report.reached)
            registry.relinquish(owner, report.generation, report.stream, report.por)
            return [], False
        commands = registry.notify(owner, report.generation, report.stream, report.session)
        hasten = any(isinstance(command, Hasten) for command in commands)
        return [
            self._answer_of(report, command)
            for command in commands
            if not isinstance(command, Hasten)
        ], hasten

    def _answer_of(
        self, report: control.Asked, command: FromRegistry
    ) -> tuple[Worker, control.Streams]:
        where = report.generation, report.step
        match command:
            case Grant((worker, _), stream, session, por):
                reached = self._reached[report.step].get(stream, MIN)
                return worker, control.Granted(*where, stream, session, por, reached)
            case Reject((worker, _), stream, session):
                return worker, control.Rejected(*where, stream, session)
            case Want((worker, _), stream):
                return worker, control.Wanted(*where, stream)
        raise AssertionError(command)

    def snapshot(self, number: int, reports: Mapping[Owner, o.Saved]) -> tuple[ByStream, ByStream]:
        """Return the positions and the watermarks of all streams for a snapshot, from the reports of the workers."""
        positions: ByStream = {}
        reached: ByStream = {}
        for step, registry in self.registries.items():
            recorded = {
                owner: dict(report.streams).get(step, {}) for owner, report in reports.items()
            }
            times = dict(self._reached[step])
            for owner, report in reports.items():
                reported = dict(report.reached).get(step, {})
                times |= {
                    name: reported[name]
                    for name in self._owned(registry, owner)
                    if name in reported
                }
            positions[step] = registry.snapshot(number, recorded)
            reached[step] = {name: at for name, at in times.items() if name in positions[step]}
        return positions, reached

    def committed(self, number: int) -> None:
        """Tell all registries that a snapshot is committed."""
        for registry in self.registries.values():
            registry.committed(number)

    def status(self) -> dict[str, int]:
        """Return the number of streams of each step."""
        return {step: len(registry.streams) for step, registry in self.registries.items()}
