"""Snapshots of a job, one at a time: when one is due, how far it is, and what comes of it.

Part of the `Lifecycle` machine, which tells it what happened. A snapshot goes through these phases::

    recording   the store writes down that this snapshot begins, so its number is never used again
    waiting     for the coordinator: no snapshot begins at certain moments of a rescale
    saving      barriers go through the stages; every worker saves its part, and says so
    whole       all have; who left meanwhile may still have something to hand over
    writing     the store writes the manifest: the commit
    publishing  (the last one only) sinks make visible what belongs to it
    none        committed or failed

Rules:

1. What a worker cannot save (a full disk) makes the snapshot fail, not the flow: the next one is tried after the usual
   time, and what was to be in the one that failed will be in it.
2. The manifest decides. While it is being written nobody knows whether the snapshot counts; a flow that is to go back
   to a snapshot waits for it.
3. A worker that leaves still has something to save: output it prepared, keys it deleted. No manifest is written until
   all who left have handed it over. Who takes part in a snapshot does not leave before all know whether it counts:
   what it would hand over could be of after the cut, and belongs to the next one.
4. A snapshot is *full* if there is none to build upon, or when what was added since the last full one has more rows
   than the state has keys. Else it has only what changed.
5. When the last one cannot be saved, it is tried again, `TRIES` times in all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from railgun.engine.protocol.placement import Worker

Phase = Literal["none", "recording", "waiting", "saving", "whole", "writing", "publishing"]
TRIES: Final = 3


@dataclass(slots=True)
class Saving:
    """The snapshots of a job: the one under way, the last that was committed, when the next is due."""

    every: int | None  # µs; None: no snapshots at all
    number: int = 0  # of the one under way, or the last
    committed: int | None = None
    foreign: bool = False  # whether that one is in another store, so none can build upon it
    phase: Phase = "none"
    full: bool = True
    last: bool = False  # whether the flow ends with it
    why: str = ""
    trouble: str = ""  # why it will fail
    due: int | None = None
    began: int = 0  # when it was time for the one under way
    asked: int = 0  # requests that wait for one to begin
    tries: int = 0  # of the last one
    rows: int = 0  # added since the last full one
    saved_rows: int = 0  # by the one under way
    saved_keys: int = 0  # that there are, as told with it
    unpublished: set[Worker] = field(default_factory=set)  # who has not made all visible
    keys: int = 0  # in all, as told with the last one

    @property
    def on(self) -> bool:
        """Whether snapshots are taken."""
        return self.every is not None

    @property
    def busy(self) -> bool:
        """Whether one is under way."""
        return self.phase != "none"

    @property
    def open(self) -> bool:
        """Whether something may be committed and not visible."""
        return self.phase == "writing" or bool(self.unpublished)

    def begin_generation(self, now: int) -> None:
        """The flow runs, from the last snapshot, all of which is visible, or the beginning."""
        self.unpublished = set()
        self.due = None if self.every is None else now + self.every

    def is_due(self, now: int) -> bool:
        """Whether one should begin."""
        if not self.on or self.busy:
            return False
        return self.asked > 0 or (self.due is not None and now >= self.due)

    def begin(self, why: str, *, last: bool = False) -> None:
        """The next snapshot; to be recorded first."""
        self.number += 1
        self.phase = "recording"
        self.full = self.committed is None or self.foreign or self.rows > self.keys
        self.last = last
        self.why = why
        self.trouble = ""
        self.asked = self.saved_rows = self.saved_keys = 0

    def end(self, now: int) -> None:
        """It is over, one way or the other. They come at an even pace; if they take long, the flow rests in between."""
        self.phase = "none"
        if self.every is not None:
            self.due = max(self.began + self.every, now + self.every // 2)

    def commit(self, now: int, members: Iterable[Worker]) -> None:
        """Its manifest is written; it is for these workers to make visible what belongs to it."""
        self.unpublished = set(members)
        self.committed, self.foreign = self.number, False
        self.rows = 0 if self.full else self.rows + self.saved_rows
        self.keys = self.saved_keys
        self.tries = 0
        self.end(now)
