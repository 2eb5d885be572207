"""What controller and workers say to each other, as whole objects over an authenticated connection.

The orders and reports that belong to a generation of the flow are those of `engine.protocol.lifecycle.messages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from railgun.engine.protocol.lifecycle.messages import WorkerOrder, WorkerReport

# ---------------------------------------------------------------- orders


@dataclass(frozen=True, slots=True)
class Setup:
    """The flow's plan, pickled by the driver; the first thing a worker gets."""

    plan: bytes
    store: tuple[str, str] | None = None
    """Where snapshots are (URL and name of the flow), if there are any."""
    careful: bool = False
    """Whether to note each record before a function is called for it, for a while: a worker was lost lately."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the next `Start` begins with: files, oldest first, and what sinks prepared, by what steps are called now."""

    snapshot: int
    parts: tuple[Any, ...]
    tokens: tuple[Any, ...]
    store: tuple[str, str] = ("", "")
    frontiers: tuple[tuple[str, int], ...] = ()
    """By step: how far time had come."""


@dataclass(frozen=True, slots=True)
class Look:
    """Someone wants to know the state of a key, or, without one, how many there are; to be answered by `Found`."""

    number: int
    step: str
    key: bytes | None = None
    """Pickled, for whoever reads it to be prepared for anything."""
    whole: bool = False
    """Whether the state itself is wanted, and not what people can read."""
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Granted:
    """A stream of connectors is this worker's; time has `reached` this in it, as far as it is in snapshots."""

    generation: int
    step: str
    stream: str
    session: int
    por: int
    reached: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Another worker has it."""

    generation: int
    step: str
    stream: str
    session: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stream of this worker is wanted elsewhere."""

    generation: int
    step: str
    stream: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where connectors of a step are to go when this worker leaves, as `host:port`."""

    generation: int
    step: str
    address: str


Streams = Granted | Rejected | Wanted
Order = Setup | Load | Look | Streams | Elsewhere | WorkerOrder

# ---------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class Loaded:
    """The flow has been loaded; or why it cannot be, here."""

    error: str | None
    doors: tuple[tuple[str, tuple[str, int]], ...] = ()
    """Where it listens for connectors, by step."""
    passing: bool = False
    """Whether it may be otherwise the next time."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A connector wants to send a stream to this worker."""

    generation: int
    step: str
    stream: str
    session: int


@dataclass(frozen=True, slots=True)
class Relinquished:
    """This worker has a stream no more."""

    generation: int
    step: str
    stream: str
    por: int
    reached: int


@dataclass(frozen=True, slots=True)
class Hastened:
    """A stream is wanted elsewhere: let the next snapshot be soon."""

    generation: int


@dataclass(frozen=True, slots=True)
class Items:
    """What a `Collect` sink got."""

    generation: int
    stage: int
    step: str
    data: bytes
    """The items as a column (`transport.columns`): if they cannot be unpickled, it is known whose they are."""
    rows: int


@dataclass(frozen=True, slots=True)
class Mark:
    """What a `Collect` sink brings from now on is not part of this snapshot."""

    generation: int
    stage: int
    step: str
    snapshot: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Something may be wrong, and people are to know; the flow goes on."""

    generation: int
    text: str
    about: str
    """What is told once, whoever tells it, and with whatever example."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """Which user code a worker was in that was lost on the machine of the one who tells this."""

    worker: int
    incarnation: int
    text: str


@dataclass(frozen=True, slots=True)
class Beat:
    """The worker lives, and how it fares."""

    generation: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to `Look`."""

    number: int
    worker: int = -1
    ready: bool = True
    """Whether there was something to look at."""
    error: str = ""
    found: bool = False
    text: str = ""
    is_json: bool = False
    pickled: bytes = b""
    timers: tuple[int, ...] = ()
    ended: bool = False
    keys: int = 0
    samples: tuple[tuple[str, bool], ...] = ()
    """Keys as text, and whether that is JSON."""


FromStreams = Asked | Relinquished | Hastened
FromWorker = WorkerReport | FromStreams | Loaded | Items | Mark | Warned | LeftBehind | Beat | Found
