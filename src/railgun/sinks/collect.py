"""Bring results back to the program that started the flow, for tests and small jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from railgun.flows.sink import Place, Sink, Writer


class Collect(Sink[Any]):
    """Brings items to the program that started the flow: `job.collected("name of the step")`."""

    def open(self, place: Place) -> Writer[Any]:
        """Return a writer that sends items to the driver."""
        return _Writer(place)


class _Writer(Writer[Any]):
    def __init__(self, place: Place) -> None:
        self.place = place

    def write(self, items: Sequence[Any]) -> None:
        self.place.to_driver(self.place.step, items)
