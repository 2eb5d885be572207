"""Track the snapshots of a job, one at a time: when one is due, its phase, and its outcome.

Part of the `Lifecycle` machine, which reports events to it. A snapshot goes through these phases::

    recording   the store writes down that this snapshot begins, so its number is never used again
    waiting     for the coordinator: no snapshot begins at certain moments of a rescale
    saving      barriers go through the stages; every worker saves and reports its part
    whole       all workers have; workers that left meanwhile may still have something to hand over
    writing     the store writes the manifest: the commit
    publishing  (the last snapshot only) sinks make visible the output that belongs to it
    none        committed or failed

Rules:

1. If a worker cannot save its part (a full disk), the snapshot fails, not the flow: the next one is tried after the
   usual interval, and will hold what the failed one was to hold.
2. The manifest decides. While it is being written it is unknown whether the snapshot counts; a flow that is to go back
   to a snapshot waits for the outcome.
3. A worker that leaves still has something to save: output it prepared, keys it deleted. No manifest is written until
   all departed workers have handed it over. A worker that takes part in a snapshot does not leave before all know
   whether it counts: its handover might contain data from after the cut, which belongs to the next snapshot.
4. A snapshot is *full* if there is none to build upon, or when the rows added since the last full one outnumber the
   keys of the state. Otherwise it holds only what changed.
5. If the last snapshot of a flow cannot be saved, it is tried again, `LAST_SNAPSHOT_TRIES` times in all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from railgun.engine.protocol.placement import Worker

Phase = Literal["none", "recording", "waiting", "saving", "whole", "writing", "publishing"]
LAST_SNAPSHOT_TRIES: Final = 3


@dataclass(slots=True)
class SnapshotRounds:
    """The snapshots of a job: the one under way, the last committed one, and when the next is due."""

    every: int | None  # interval in µs; None: no snapshots at all
    number: int = 0  # of the snapshot under way, or of the last one
    committed: int | None = None  # number of the last committed snapshot
    foreign: bool = False  # whether that one is in another store, so none can build upon it
    phase: Phase = "none"
    full: bool = True
    last: bool = False  # whether the flow ends with this snapshot
    why: str = ""  # the reason for this snapshot
    failure_reason: str = ""  # why this snapshot will fail
    due: int | None = None  # when the next one should begin, in µs
    began: int = 0  # when the one under way was due, in µs
    requests: int = 0  # requests that wait for a snapshot to begin
    tries: int = 0  # of the last snapshot
    rows: int = 0  # added since the last full snapshot
    saved_rows: int = 0  # by the snapshot under way
    saved_keys: int = 0  # number of keys, as reported for the snapshot under way
    unpublished: set[Worker] = field(default_factory=set)  # workers with output not yet visible
    keys: int = 0  # number of keys, as reported for the last committed snapshot

    @property
    def on(self) -> bool:
        """Return whether the job takes snapshots."""
        return self.every is not None

    @property
    def busy(self) -> bool:
        """Return whether a snapshot is under way."""
        return self.phase != "none"

    @property
    def open(self) -> bool:
        """Return whether some output may be committed but not visible."""
        return self.phase == "writing" or bool(self.unpublished)

    def begin_generation(self, now: int) -> None:
        """Begin a generation: the flow runs from the last snapshot, all visible, or from the beginning."""
        self.unpublished = set()
        self.due = None if self.every is None else now + self.every

    def is_due(self, now: int) -> bool:
        """Return whether a snapshot should begin."""
        if not self.on or self.busy:
            return False
        return self.requests > 0 or (self.due is not None and now >= self.due)

    def begin(self, why: str, *, last: bool = False) -> None:
        """Begin the next snapshot, in phase "recording"."""
        self.number += 1
        self.phase = "recording"
        self.full = self.committed is None or self.foreign or self.rows > self.keys
        self.last = last
        self.why = why
        self.failure_reason = ""
        self.requests = self.saved_rows = self.saved_keys = 0

    def end(self, now: int) -> None:
        """End the snapshot under way and plan the next: at an even pace, but with a pause after a slow one."""
        self.phase = "none"
        if self.every is not None:
            self.due = max(self.began + self.every, now + self.every // 2)

    def commit(self, now: int, members: Iterable[Worker]) -> None:
        """Commit: the manifest is written, and these workers now make their output visible."""
        self.unpublished = set(members)
        self.committed, self.foreign = self.number, False
        self.rows = 0 if self.full else self.rows + self.saved_rows
        self.keys = self.saved_keys
        self.tries = 0
        self.end(now)
