"""Messages between masters and replicas of a stream, commands to a driver, and the driver's duties.

A driver owns the disk, the connections and the promises of its node. Its duties:

1. *Promises.* A master opens a session with each replica by `Fence`. The replica's node promises to accept nothing of
   an older epoch, and the promise is on disk before `Fenced` is sent; a node that has promised a later epoch refuses.
   Then the driver calls `fenced` of its `Replica`, after pending writes are finished: the standing that is sent back is
   on disk. A node that becomes a master has made the promise itself, and finished its writes. A master whose node
   promises a later epoch stops being one at that moment: it counts no answers any more after its standing was sent.
2. *Sessions.* Messages of one session arrive in order, or not at all: if one may be lost, the session is over, and the
   master opens another. Messages of any session but the last are dropped. Above all, the answer to a `Fence` of an
   older epoch is no promise for this one: `stands` is called for the last session of this very epoch only. Session
   numbers of a master and a replica grow, across epochs and restarts.
3. *Commands* are executed in the order in which they are given. `Write`, `Cut`, `Anew` and `Label` are on disk before
   `wrote`, `has_cut`, `labelled` and so on are called. `Anew` is done as a whole or not at all; a `Write` may be torn
   between two batches, also within a unit (rule 8 of `master`), but `appended` is of whole units. If a `Write` or a
   `Label` fails, those that wait behind it are dropped, and `failed` is called; the same holds for `WriteGroups` and
   `failed_groups`. If a `Cut`, a `CutHalf`, an `Anew` or a `Trim` fails, the node reads its copy from disk again, as
   after a crash. A master that cannot write stops being one.
4. A copy that finds its files damaged sets aside the damage and everything behind it, and drops pending writes; its
   label is `LOST`, on disk, before it sends or handles any further message (`lost`). A master stops being one then. The
   safe offset that a copy knew may be of an `Anew` that was dropped: a driver that reads a copy from disk again begins
   without it, or with one that was written behind the `Anew`, in the same queue.
5. A `Fetch` is answered in the last session, from what is on disk.
6. A master sends a `push`, with batches or without, when a session begins, when a replica has sent a new standing, and
   when the safe or the first kept offset has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from railgun.broker.protocol.replication.standing import Runs, Standing

Id: TypeAlias = str

# ---------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Push:
    """From the master: batches from `base` on, of the epochs in `runs`. Without runs, only the other fields matter."""

    session: int
    epoch: int
    base: int
    before: int
    """The epoch of the message before `base`; 0 if there is none, or if it is no longer kept."""
    start: int
    """The offset where the epoch began."""
    safe: int
    """The high watermark: all messages below are safe."""
    first: int
    """The first offset that the master keeps."""
    anew: bool = False
    """Whether the replica must drop its copy and begin at `base`."""
    runs: Runs = ()
    turn: int = 0
    """How often the replica has sent `Stands` in this session: pushes of an earlier turn are void."""

    @property
    def end(self) -> int:
        """Return the offset after the last pushed message."""
        return self.runs[-1][1] if self.runs else self.base


@dataclass(frozen=True, slots=True)
class Has:
    """From a replica: its copy is on disk up to `end`, and is kept from `first` on."""

    session: int
    end: int
    labelled: bool
    first: int


@dataclass(frozen=True, slots=True)
class Stands:
    """From a replica: a push does not fit its copy (a full disk, or damage); push again from this standing."""

    session: int
    standing: Standing


@dataclass(frozen=True, slots=True)
class Fetch:
    """From a master that recovers: send the batches from `begin` on."""

    session: int
    begin: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answer to `Fetch`: at least the next batch; or no runs, if they cannot be read."""

    session: int
    base: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class PushGroups:
    """From the master: the states of all groups (`whole`), or the changes that lead to `number`."""

    session: int
    epoch: int
    number: int
    whole: bool
    turn: int = 0
    """As in `Push`."""


@dataclass(frozen=True, slots=True)
class HasGroups:
    """From a replica: its groups are on disk up to this epoch and number."""

    session: int
    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class FetchGroups:
    """From a master that recovers: send the states of all groups."""

    session: int


@dataclass(frozen=True, slots=True)
class FetchedGroups:
    """Answer to `FetchGroups`: the states as of this epoch and number; `epoch` is LOST if they cannot be read."""

    session: int
    epoch: int
    number: int


Message: TypeAlias = (
    Push | Has | Stands | Fetch | Fetched | PushGroups | HasGroups | FetchGroups | FetchedGroups
)

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message to a node."""

    to: Id
    message: Message


@dataclass(frozen=True, slots=True)
class Write:
    """Append the batches that came with the message, and sync; then call `wrote`."""

    base: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut the log at `offset`, then call `has_cut`; set the cut part aside for operators."""

    offset: int


@dataclass(frozen=True, slots=True)
class CutHalf:
    """If the log ends within a unit, cut the unit off; then call `cut_half` with the end of the log."""


@dataclass(frozen=True, slots=True)
class Anew:
    """Drop the log; it begins anew, empty, at `base`."""

    base: int


@dataclass(frozen=True, slots=True)
class Label:
    """Write to disk that the copy matches the log of this epoch; then call `labelled`.

    `groups`: also write that its groups are number 0 of the epoch (for a master).
    """

    epoch: int
    groups: bool = False


@dataclass(frozen=True, slots=True)
class Trim:
    """Remove messages before `first`: the master no longer keeps them."""

    first: int


@dataclass(frozen=True, slots=True)
class WriteGroups:
    """Write the states or changes that came with the message, with their number; then call `wrote_groups`."""

    epoch: int
    number: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Serve:
    """Start to accept publishes: the copy is the log of the epoch, which begins at `start`."""

    start: int


@dataclass(frozen=True, slots=True)
class Safe:
    """Messages below `end` are safe: readers may see them."""

    end: int


@dataclass(frozen=True, slots=True)
class SafeGroups:
    """Changes of groups up to this number are safe."""

    number: int


Command: TypeAlias = (
    Say | Write | Cut | CutHalf | Anew | Label | Trim | WriteGroups | Serve | Safe | SafeGroups
)
