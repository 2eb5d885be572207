"""What masters and replicas of a stream say to each other, what is to be done, and what a driver has to see to.

A driver owns the disk, the links and the promises of its node. Its duties:

1. *Promises.* A master opens a session with each replica by `Fence`. The replica's node promises to take nothing of an
   older epoch, and the promise is on disk before `Fenced` is sent; a node that has promised more refuses. Then its
   `Replica` is told (`fenced`), and what was being written is written first: the standing that goes back is on disk.
   A node that becomes a master has made the promise itself, and written what it had to write. A master whose node
   promises a later epoch is none from that moment: it counts nothing any more after its standing was told.
2. *Sessions.* Messages of one session come in order, or not at all: if one may be lost, the session is over, and the
   master opens another one. What belongs to another session than the last is not for anybody to hear. Above all, the
   answer to a `Fence` of an older epoch is no promise for this one: `stands` is called for the last session of this
   very epoch only. Session numbers of a master and a replica grow, through epochs and restarts.
3. *Commands* are done in the order in which they are given. `Write`, `Cut`, `Anew` and `Label` are on disk before
   `wrote`, `has_cut`, `labelled` and so on are called. `Anew` is done as a whole or not at all; a `Write` may be torn
   between two batches, also within a unit (rule 8 of `master`), but `appended` is of whole units. If a `Write` or a
   `Label` fails, those that wait behind it are dropped, and `failed` is called; the same of `WriteGroups` and
   `failed_groups`. If a `Cut`, a `CutHalf`, an `Anew` or a `Trim` fails, the node reads its copy from disk again, as
   after a crash. A master that cannot write is none any more.
4. A copy that finds its files damaged sets aside what is bad and all behind it, drops what waits to be written, and its
   label is `LOST`, on disk, before it says or hears anything more (`lost`). A master is none any more then.
   What a copy knew to be safe may be of an `Anew` that was dropped: who reads a copy from disk again begins without it,
   or with one that was written behind the `Anew`, in the same line.
5. A `Fetch` is answered in the session that is the last, from what is on disk.
6. A master says something (`push`, with batches or without) when a session begins, when a replica has told anew how it
   stands, and when what is safe or kept has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from railgun.broker.protocol.replication.standing import Runs, Standing

Id: TypeAlias = str

# ---------------------------------------------------------------- what is said


@dataclass(frozen=True, slots=True)
class Push:
    """From the master: batches from `base` on (`runs` says of which epochs; none: only what is said here)."""

    session: int
    epoch: int
    base: int
    before: int
    """The epoch of what lies before `base`; 0 if that is nothing, or not kept any more."""
    start: int
    """Where the epoch began."""
    safe: int
    """The high watermark."""
    first: int
    """What lies before is not kept any more."""
    anew: bool = False
    """Drop what you have, and begin at `base`."""
    runs: Runs = ()
    turn: int = 0
    """How often the replica has said in this session how it stands (`Stands`): what was sent before is void."""

    @property
    def end(self) -> int:
        """The offset after it."""
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
    """From a replica: what was pushed does not fit (a full disk, or damage): begin anew from here."""

    session: int
    standing: Standing


@dataclass(frozen=True, slots=True)
class Fetch:
    """From a master that recovers: give me what you have from there on."""

    session: int
    begin: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The answer: batches, the next ones at least; or none, for they cannot be read."""

    session: int
    base: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class PushGroups:
    """From the master: the states of all groups (`whole`), or the changes that make number `number`."""

    session: int
    epoch: int
    number: int
    whole: bool
    turn: int = 0
    """As in `Push`."""


@dataclass(frozen=True, slots=True)
class HasGroups:
    """From a replica: the groups are on disk up to there."""

    session: int
    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class FetchGroups:
    """From a master that recovers: give me the states of your groups."""

    session: int


@dataclass(frozen=True, slots=True)
class FetchedGroups:
    """The answer: the states as of there; or they cannot be read (`epoch` is LOST)."""

    session: int
    epoch: int
    number: int


Message: TypeAlias = (
    Push | Has | Stands | Fetch | Fetched | PushGroups | HasGroups | FetchGroups | FetchedGroups
)

# ---------------------------------------------------------------- what is to be done


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message."""

    to: Id
    message: Message


@dataclass(frozen=True, slots=True)
class Write:
    """Append the batches that came with the message, and sync; then `wrote`."""

    base: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut the log off there, then `has_cut`; what is cut is kept aside, for people."""

    offset: int


@dataclass(frozen=True, slots=True)
class CutHalf:
    """If the log ends within a unit, cut that off; then `cut_half`, with the end of the log."""


@dataclass(frozen=True, slots=True)
class Anew:
    """Drop the log; it begins anew, empty, at this offset."""

    base: int


@dataclass(frozen=True, slots=True)
class Label:
    """Write to disk that the copy matches this epoch's log; then `labelled`.

    `groups`: and that its groups are number 0 of that epoch, for a master.
    """

    epoch: int
    groups: bool = False


@dataclass(frozen=True, slots=True)
class Trim:
    """What lies before is not kept any more, by the master: take it away."""

    first: int


@dataclass(frozen=True, slots=True)
class WriteGroups:
    """Write the states or changes that came with the message, and their number with them; then `wrote_groups`."""

    epoch: int
    number: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Serve:
    """The copy is the log: take what is published."""

    start: int


@dataclass(frozen=True, slots=True)
class Safe:
    """Messages below this offset are safe, and readers may see them."""

    end: int


@dataclass(frozen=True, slots=True)
class SafeGroups:
    """Changes of groups up to this number are safe."""

    number: int


Command: TypeAlias = (
    Say | Write | Cut | CutHalf | Anew | Label | Trim | WriteGroups | Serve | Safe | SafeGroups
)
