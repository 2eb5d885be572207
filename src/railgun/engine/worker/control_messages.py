"""Define the messages between controller and workers, sent as objects over an authenticated connection.

The orders and reports that belong to a generation of the flow are defined in `engine.protocol.lifecycle.messages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from railgun.engine.protocol.lifecycle.messages import WorkerOrder, WorkerReport

# ---------------------------------------------------------------- orders


@dataclass(frozen=True, slots=True)
class Setup:
    """The flow's plan, pickled by the controller: the first message that a worker receives."""

    plan: bytes
    store: tuple[str, str] | None = None
    """The store of snapshots (URL and name of the flow), or None."""
    careful: bool = False
    """Whether to note each record before a function is called for it, for a while, because a worker was lost."""


@dataclass(frozen=True, slots=True)
class Load:
    """The content that the next `Start` loads: files, oldest first, and prepared output of sinks.

    Both use the present names of steps.
    """

    snapshot: int
    parts: tuple[Any, ...]
    tokens: tuple[Any, ...]
    store: tuple[str, str] = ("", "")
    frontiers: tuple[tuple[str, int], ...] = ()
    """By step: the watermark."""


@dataclass(frozen=True, slots=True)
class Look:
    """A query for the state of a key or, without a key, for the number of keys. The answer is `Found`."""

    number: int
    step: str
    key: bytes | None = None
    """The pickled key, which may come from anyone, so the reader must unpickle it with care."""
    whole: bool = False
    """Whether the pickled state is wanted instead of a text for people."""
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Granted:
    """A stream of connectors is assigned to this worker; `reached` is its watermark in the last snapshot."""

    generation: int
    step: str
    stream: str
    session: int
    por: int
    reached: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Another worker has the stream."""

    generation: int
    step: str
    stream: str
    session: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Another worker wants a stream of this worker."""

    generation: int
    step: str
    stream: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The address (`host:port`) where connectors of a step are to go when this worker leaves."""

    generation: int
    step: str
    address: str


Streams = Granted | Rejected | Wanted
Order = Setup | Load | Look | Streams | Elsewhere | WorkerOrder

# ---------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class Loaded:
    """The flow has been loaded, or why it cannot be loaded here."""

    error: str | None
    doors: tuple[tuple[str, tuple[str, int]], ...] = ()
    """The address where the worker listens for connectors, by step."""
    passing: bool = False
    """Whether a retry may succeed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A connector wants to send a stream to this worker."""

    generation: int
    step: str
    stream: str
    session: int


@dataclass(frozen=True, slots=True)
class Relinquished:
    """This worker gives a stream back."""

    generation: int
    step: str
    stream: str
    por: int
    reached: int


@dataclass(frozen=True, slots=True)
class Hastened:
    """A stream is wanted by another worker, so the next snapshot should be taken soon."""

    generation: int


@dataclass(frozen=True, slots=True)
class Items:
    """Items that a `Collect` sink has received."""

    generation: int
    stage: int
    step: str
    data: bytes
    """The items as a column (`transport.columns`), so that an unpickling error can name the step."""
    rows: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The items that a `Collect` sink sends from now on are not part of this snapshot."""

    generation: int
    stage: int
    step: str
    snapshot: int


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning for people; the flow goes on."""

    generation: int
    text: str
    about: str
    """Identifies the warning: people see it once, although several workers send it with different examples."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The user code in which a worker was lost on the machine of the sender."""

    worker: int
    incarnation: int
    text: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat of the worker, with its metrics."""

    generation: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to `Look`."""

    number: int
    worker: int = -1
    ready: bool = True
    """Whether the worker has a running flow whose state can be read."""
    error: str = ""
    found: bool = False
    text: str = ""
    is_json: bool = False
    pickled: bytes = b""
    timers: tuple[int, ...] = ()
    ended: bool = False
    keys: int = 0
    samples: tuple[tuple[str, bool], ...] = ()
    """Keys as text, each with whether the text is JSON."""


FromStreams = Asked | Relinquished | Hastened
FromWorker = WorkerReport | FromStreams | Loaded | Items | Mark | Warned | LeftBehind | Beat | Found
