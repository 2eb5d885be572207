"""What controller and workers say to each other, as whole objects over an authenticated connection.

The orders and reports that belong to a generation of the flow are those of `core.orders`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from railgun.core.orders import WorkerOrder, WorkerReport

# ---------------------------------------------------------------- orders


@dataclass(frozen=True, slots=True)
class Setup:
    """The flow's plan, pickled by the driver; the first thing a worker gets."""

    plan: bytes
    store: tuple[str, str] | None = None
    """Where snapshots are (URL and name of the flow), if there are any."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the next `Start` begins with: files, oldest first, and what sinks prepared, by what steps are called now."""

    snapshot: int
    parts: tuple[Any, ...]
    tokens: tuple[Any, ...]
    store: tuple[str, str] = ("", "")


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


Order = Setup | Load | Look | WorkerOrder

# ---------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class Loaded:
    """The flow has been loaded; or why it cannot be, here."""

    error: str | None


@dataclass(frozen=True, slots=True)
class Items:
    """What a `Collect` sink got."""

    generation: int
    stage: int
    step: str
    items: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """What a `Collect` sink brings from now on is not part of this snapshot."""

    generation: int
    stage: int
    step: str
    snapshot: int


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


FromWorker = WorkerReport | Loaded | Items | Mark | Beat | Found
