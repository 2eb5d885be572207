"""What the controller orders and workers report, as data: the vocabulary of `lifecycle`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m

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
    snapshot: int | None = None
    """What to begin with; None: with nothing."""
    recover: bool = False
    """Whether this worker commits again what sinks prepared for that snapshot."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Everybody is ready: read your sources."""

    generation: int
    snapshot: int = 0
    """The number of the last one that began."""


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
    """Nobody needs you any more; `handing_over`: say first what is to be saved of you (`Farewell`)."""

    handing_over: bool = False


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Put the barrier of a snapshot behind what your sources have sent; `full`: save all keys, else what changed."""

    generation: int
    snapshot: int
    full: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """A snapshot is committed; or it is not, and will not be."""

    generation: int
    snapshot: int
    committed: bool
    tokens: tuple[Any, ...] = ()
    """What this worker is to commit beside its own: what workers that left prepared, and for sinks that commit together
    what all workers did, who leave it to this one."""


WorkerOrder = Start | Begin | Tell | EndSources | StopSources | Stop | TakeSnapshot | Settled

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


@dataclass(frozen=True, slots=True)
class Saved:
    """This worker's part of a snapshot: files, and what its sinks prepared; or why it cannot be saved."""

    generation: int
    snapshot: int
    parts: tuple[Any, ...] = ()
    tokens: tuple[Any, ...] = ()
    rows: int = 0
    keys: int = 0
    phases: tuple[tuple[str, float], ...] = ()
    error: str = ""
    streams: tuple[tuple[str, dict[str, int]], ...] = ()
    """By step: how far the streams of connectors are here."""
    frontiers: tuple[tuple[str, int], ...] = ()
    """By step: how far time had come at the cut, as its records and timers were told."""
    reached: tuple[tuple[str, dict[str, int]], ...] = ()
    """By step: how far time has come in each stream of connectors here."""


@dataclass(frozen=True, slots=True)
class Farewell:
    """What is to be saved of a worker that leaves, with the next snapshot."""

    generation: int
    parts: tuple[Any, ...] = ()
    tokens: tuple[Any, ...] = ()
    error: str = ""
    streams: tuple[tuple[str, dict[str, int]], ...] = ()
    reached: tuple[tuple[str, dict[str, int]], ...] = ()


@dataclass(frozen=True, slots=True)
class Published:
    """Sinks have made visible what belongs to a snapshot."""

    generation: int
    snapshot: int


WorkerReport = Ready | Joined | Report | Ended | Failed | Saved | Farewell | Published

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


@dataclass(frozen=True, slots=True)
class Record:
    """Have the store write down that this snapshot begins; answer with `recorded`."""

    snapshot: int
    full: bool
    why: str


@dataclass(frozen=True, slots=True)
class Write:
    """Have the store write the manifest of this snapshot; answer with `written`."""

    snapshot: int
    finished: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A snapshot has failed; have the store write down why."""

    snapshot: int
    why: str


Order = Launch | Cancel | To | Happened | Record | Write | GiveUp
