"""Define the orders of the controller and the reports of workers: the vocabulary of `lifecycle`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m

Address = tuple[str, int]

# ---------------------------------------------------------------- orders to workers


@dataclass(frozen=True, slots=True)
class Start:
    """Discard the current state, make the stages anew, call the workers in `dial`, and expect calls of the others."""

    generation: int
    placement: Placement
    members: tuple[Worker, ...]
    epochs: tuple[int, ...]
    dial: tuple[tuple[Worker, Address], ...]
    snapshot: int | None = None
    """The snapshot to begin with; None: begin without state."""
    recover: bool = False
    """Whether this worker commits again the output that sinks prepared for that snapshot."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Read your sources: every worker is ready."""

    generation: int
    snapshot: int = 0
    """The number of the last snapshot that began."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand an event to the distributor of a stage."""

    generation: int
    stage: int
    event: m.Join | m.Rescale | m.Depart


@dataclass(frozen=True, slots=True)
class EndSources:
    """List no more parts of your sources: this worker is to leave."""

    generation: int


@dataclass(frozen=True, slots=True)
class StopSources:
    """Read no more: the flow is to end."""

    generation: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the flow; with `handing_over`, first send what is to be saved of this worker (`Farewell`)."""

    handing_over: bool = False


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Put the barrier of a snapshot behind your sources' records; `full`: save all keys, else the changed ones."""

    generation: int
    snapshot: int
    full: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """A snapshot was committed, or it failed."""

    generation: int
    snapshot: int
    committed: bool
    tokens: tuple[Any, ...] = ()
    """Output this worker is to commit beside its own: what departed workers prepared and, for sinks that commit
    together, the output of all workers, which leave it to this one."""


WorkerOrder = Start | Begin | Tell | EndSources | StopSources | Stop | TakeSnapshot | Settled

# ---------------------------------------------------------------- reports of workers


@dataclass(frozen=True, slots=True)
class Ready:
    """The stages are made, and the links are open."""

    generation: int


@dataclass(frozen=True, slots=True)
class Joined:
    """All stages know the new members, and the links to them are open."""

    generation: int


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a stage's distributor."""

    generation: int
    stage: int
    report: m.Started | m.Completed | m.Left


@dataclass(frozen=True, slots=True)
class Ended:
    """Every stage has ended on this worker."""

    generation: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Something went wrong; `final`: it would go wrong again, so the flow must stop."""

    generation: int
    error: str
    final: bool
    step: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """This worker's part of a snapshot: files, and output its sinks prepared; or why it cannot be saved."""

    generation: int
    snapshot: int
    parts: tuple[Any, ...] = ()
    tokens: tuple[Any, ...] = ()
    rows: int = 0
    keys: int = 0
    phases: tuple[tuple[str, float], ...] = ()
    error: str = ""
    streams: tuple[tuple[str, dict[str, int]], ...] = ()
    """By step: the positions of connectors' streams on this worker."""
    frontiers: tuple[tuple[str, int], ...] = ()
    """By step: the frontier at the cut, as announced to its records and timers."""
    reached: tuple[tuple[str, dict[str, int]], ...] = ()
    """By step: how far time has advanced in each stream of connectors on this worker."""


@dataclass(frozen=True, slots=True)
class Farewell:
    """What the next snapshot has to save of a worker that leaves."""

    generation: int
    parts: tuple[Any, ...] = ()
    tokens: tuple[Any, ...] = ()
    error: str = ""
    streams: tuple[tuple[str, dict[str, int]], ...] = ()
    reached: tuple[tuple[str, dict[str, int]], ...] = ()


@dataclass(frozen=True, slots=True)
class Published:
    """Sinks have made visible the output that belongs to a snapshot."""

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
    """Report an event to people; `kind` is one word for programs."""

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
    """Have the store write down why a snapshot failed."""

    snapshot: int
    why: str


Order = Launch | Cancel | To | Happened | Record | Write | GiveUp
