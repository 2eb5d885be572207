"""What the controller orders and workers report, as data: the vocabulary of `lifecycle`."""

from __future__ import annotations

from dataclasses import dataclass

from railgun.core.placement import Placement, Worker
from railgun.core.rescale import messages as m

Address = tuple[str, int]

# ---------------------------------------------------------------- orders to workers


@dataclass(frozen=True, slots=True)
class Start:
    """Give up what you have, and make the stages anew; call these workers, and expect calls of the others."""

    generation: int
    placement: Placement
    members: tuple[Worker, ...]
    epochs: tuple[int, ...]
    dial: tuple[tuple[Worker, Address], ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Everybody is ready: read your sources."""

    generation: int


@dataclass(frozen=True, slots=True)
class Tell:
    """An event for the distributor of a stage."""

    generation: int
    stage: int
    event: m.Join | m.Rescale | m.Depart


@dataclass(frozen=True, slots=True)
class EndSources:
    """List no more: you are to leave."""

    generation: int


@dataclass(frozen=True, slots=True)
class StopSources:
    """Read no more: the flow is to end."""

    generation: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Nobody needs you any more."""


WorkerOrder = Start | Begin | Tell | EndSources | StopSources | Stop

# ---------------------------------------------------------------- reports of workers


@dataclass(frozen=True, slots=True)
class Ready:
    """The stages are made, the links are open."""

    generation: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The new members are known to all stages, and their links are open."""

    generation: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a stage's distributor reported."""

    generation: int
    stage: int
    report: m.Started | m.Completed | m.Left


@dataclass(frozen=True, slots=True)
class Ended:
    """Every stage has come to its end here."""

    generation: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Something went wrong; `final`: it would again, so the flow is to stop."""

    generation: int
    error: str
    final: bool
    step: str = ""


WorkerReport = Ready | Joined | Report | Ended | Failed

# ---------------------------------------------------------------- orders to the controller


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a worker's process."""

    worker: Worker
    incarnation: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a worker's process by force."""

    worker: Worker
    incarnation: int


@dataclass(frozen=True, slots=True)
class To:
    """Send an order to a worker."""

    worker: Worker
    order: WorkerOrder


@dataclass(frozen=True, slots=True)
class Happened:
    """Tell people; `kind` is one word for programs."""

    kind: str
    text: str


Order = Launch | Cancel | To | Happened
