"""The streams that connectors push, over all workers: one registry (`core.sources`) for each source of them.

Part of the ledger: it goes along with generations, snapshots and workers as they come and leave.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from railgun.core.placement import Worker
from railgun.core.sources.messages import FromRegistry, Grant, Hasten, Owner, Reject, Want
from railgun.core.sources.registry import Active, Registry
from railgun.flow.plan import Plan
from railgun.wire import control

Positions: TypeAlias = Mapping[str, Mapping[str, int]]
"""By step: how far each stream is."""
_LOG: Final = logging.getLogger(__name__)


class Feeds:
    """All streams of a job."""

    def __init__(self, plan: Plan) -> None:
        self.registries = {step: Registry() for step in plan.pushed}

    def go_back(self, generation: int, positions: Positions, members: Iterable[Owner]) -> None:
        """A generation begins, with what a snapshot holds."""
        owners = list(members)
        for step, registry in self.registries.items():
            registry.go_back(generation, positions.get(step, {}), owners)

    def joined(self, owner: Owner) -> None:
        """A worker takes part."""
        for registry in self.registries.values():
            registry.joined(owner)

    def left(self, owner: Owner, generation: int, seen: Positions) -> None:
        """A worker is gone; what it saw."""
        for step, registry in self.registries.items():
            registry.left(owner, generation, seen.get(step, {}))

    def heard(
        self, owner: Owner, report: control.Asked | control.Relinquished
    ) -> tuple[list[tuple[Worker, control.Streams]], bool]:
        """A worker asks for a stream, or gives one back: what to say to whom, and whether a snapshot should be soon."""
        registry = self.registries[report.step]
        if isinstance(report, control.Relinquished):
            known = registry.streams.get(report.stream)
            if not isinstance(known, Active) or known.owner != owner:
                _LOG.info("worker %s gives back %r, which it does not have", owner, report.stream)
            registry.relinquish(owner, report.generation, report.stream, report.por)
            return [], False
        told = registry.notify(owner, report.generation, report.stream, report.session)
        hasten = any(isinstance(command, Hasten) for command in told)
        return [self._said(report, one) for one in told if not isinstance(one, Hasten)], hasten

    @staticmethod
    def _said(report: control.Asked, command: FromRegistry) -> tuple[Worker, control.Streams]:
        where = report.generation, report.step
        match command:
            case Grant((worker, _), stream, session, por):
                return worker, control.Granted(*where, stream, session, por)
            case Reject((worker, _), stream, session):
                return worker, control.Rejected(*where, stream, session)
            case Want((worker, _), stream):
                return worker, control.Wanted(*where, stream)
        raise AssertionError(command)

    def snapshot(
        self, number: int, recorded: Mapping[Owner, Positions]
    ) -> dict[str, dict[str, int]]:
        """What a snapshot holds, by what workers recorded."""
        return {
            step: registry.snapshot(
                number, {owner: told.get(step, {}) for owner, told in recorded.items()}
            )
            for step, registry in self.registries.items()
        }

    def committed(self, number: int) -> None:
        """A snapshot is committed."""
        for registry in self.registries.values():
            registry.committed(number)

    def status(self) -> dict[str, int]:
        """How many streams there are, by step."""
        return {step: len(registry.streams) for step, registry in self.registries.items()}
