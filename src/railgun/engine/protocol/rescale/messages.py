"""Define the events a distributor takes, the messages distributors exchange, and the commands they return.

The driver of a `Distributor` has these duties:

1. Feed events one at a time; carry out the returned commands in order before the next event.
2. Keep links first-in-first-out, and give each message to the peer's distributor of the same stage, as
   `Received(sender, message)`.
3. Answer `Interrogate` with `Interrogated`, naming every key that has state and leaves (`Migration.leaving`), and
   `Collect` with `Collected`. The answer may take time: the distributor copes with any event in between. Keys leave in
   the order in which they are named, so name them in memory order. Sorting many keys takes long: sort them elsewhere.
4. Give `Move` while the distributor is `movable`. The driver chooses how many keys move at once: more keys move
   faster, but their records are held longer.
5. On `RaiseFence` pass the fence as `PassFence` to the distributor of each following stage, and carry each `Confirm` to
   the worker it names, as `Received(self, fenced)` for the distributor of that stage.
6. Keep in a key's state whether the key has ended (`Advance(MAX)`): a key that ended before it moved stays ended, and a
   key that had not ended ends at its new owner.
7. Where operators emit on their own (readers do), give `Bound` after every `Process` and `Take`, when the bound rises,
   and when the operators fall idle or wake: before they emit.
8. On `Snapshot` save the operators' state, then pass the barrier to the following stages.
9. Let a joining worker send no record older than the frontier any member of the stage has announced by then. A joining
   worker has only what moves to it, so this holds by itself where sources obey rule 13.
10. After a `ProtocolError`, end the machine, its generation and its links: a message from before a rollback must never
    reach a machine made after it.
11. Begin no rescale of a stage while a snapshot passes through it, and no snapshot until every worker has heard of the
    rescale (`Coordinator` ensures this).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from railgun.engine.protocol.batch import Batch
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale.order import Order, Turns
from railgun.hashing import Hashes

# ---------------------------------------------------------------- messages between workers


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Records that the sender routed by its placement of this epoch.

    To a receiver that migrates from epoch e to e+1, records of epoch e are OLD and records of epoch e+1 are NEW.
    """

    epoch: int
    batch: Batch


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """FWD: records that reached the home of their keys and that the home forwards to the new owner."""

    epoch: int
    batch: Batch


@dataclass(frozen=True, slots=True, eq=False)
class Acquire:
    """The state of a chunk of keys, sent to their new owner.

    Each key is sent once. Keys are not sorted by hash. A home numbers its chunks from 1.
    """

    epoch: int
    chunk: int
    hashes: Hashes
    state: Any


@dataclass(frozen=True, slots=True)
class Heard:
    """The sender has heard of the rescale to this epoch; its earlier messages were sent without knowing of it.

    `frontier` is the one announced to the sender's operators by then.
    """

    epoch: int
    frontier: int


@dataclass(frozen=True, slots=True)
class Done:
    """The sender, a home, has given away all keys that leave it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Flush:
    """The sender sends no more records to the receiver as a home."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """The sender, a home, has forwarded all records it will ever get from `origin`."""

    epoch: int
    origin: Worker


@dataclass(frozen=True, slots=True)
class Bar1:
    """The cut of a snapshot in the sender's own records; it may still forward records of others."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class Bar2:
    """The cut of a snapshot in everything the sender sends, forwarded records included."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class Frontier:
    """The sender's own upstream has reached this time. `epoch` is the last one the sender has heard of."""

    epoch: int
    value: int


@dataclass(frozen=True, slots=True)
class Relay:
    """The sender, a home, forwards no more records below this time."""

    epoch: int
    value: int


@dataclass(frozen=True, slots=True)
class Emission:
    """No operator of the sender emits below this time any more, in this epoch; `LAST`: its operators are idle."""

    epoch: int
    value: int


@dataclass(frozen=True, slots=True)
class Fence:
    """A marker that follows everything a home of `stage` emitted for the keys of a chunk.

    Chunk 0 stands for all keys for which the home never had state.
    """

    stage: str
    epoch: int
    home: Worker
    chunk: int
    owners: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Fenced:
    """The sender has seen this fence: later records can no longer overtake what the home emitted before it."""

    epoch: int
    home: Worker
    chunk: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The last message of a worker that leaves the stage."""


Message = (
    Data
    | Forward
    | Acquire
    | Heard
    | Done
    | Flush
    | Flushed
    | Bar1
    | Bar2
    | Frontier
    | Relay
    | Emission
    | Fence
    | Fenced
    | Leave
)

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """Records from the worker's own upstream."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Advanced:
    """The worker's own upstream has reached this time; `MAX`: the upstream has ended."""

    value: int


@dataclass(frozen=True, slots=True)
class StartSnapshot:
    """The worker's own upstream has delivered the barrier of a snapshot."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class PassFence:
    """The preceding stage, on this worker, raised a fence."""

    fence: Fence


@dataclass(frozen=True, slots=True)
class Received:
    """A peer's message has arrived on its link."""

    sender: Worker
    message: Message


@dataclass(frozen=True, slots=True)
class Join:
    """These workers join the stage now; they own no key until a rescale gives them one."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Depart:
    """Leave the stage as soon as this worker has no keys and its upstream has ended."""


@dataclass(frozen=True, slots=True)
class Rescale:
    """Migrate to this placement."""

    epoch: int
    placement: Placement


@dataclass(frozen=True, slots=True, eq=False)
class Interrogated:
    """The operators' answer to `Interrogate`: all keys that have state and leave, in the order of leaving."""

    named: Order


@dataclass(frozen=True, slots=True)
class Move:
    """Allow up to `keys` keys to move now."""

    keys: int = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The operators' answer to `Collect`: the state of each part, in the order of the parts."""

    states: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """The earliest time at which the operators may emit on their own (readers do).

    `MAX`: they never emit again. `LAST`: they are idle, and no worker should wait for them; what they emit after they
    wake is late if time has passed it meanwhile.
    """

    value: int


UpstreamEvent = Local | Advanced | StartSnapshot | PassFence
Event = UpstreamEvent | Received | Join | Depart | Rescale | Interrogated | Move | Collected | Bound

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, eq=False)
class Process:
    """Hand these records to the operators."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on the link to a worker."""

    to: Worker
    message: Message


@dataclass(frozen=True, slots=True)
class Interrogate:
    """Ask the operators for all keys that have state and leave."""


@dataclass(frozen=True, slots=True, eq=False)
class Collect:
    """Advance these keys to `frontier`, then take their state from the operators, part by part.

    `turns` gives, for each part, the positions of its keys in the order of leaving. That order is the one of
    `Interrogated`, followed by the keys that `Interrogated` did not name.
    """

    parts: tuple[tuple[Worker, Hashes], ...]
    frontier: int
    turns: tuple[Turns, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Give the operators this state from another worker."""

    hashes: Hashes
    state: Any


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """Forget the state of these keys: they live on another worker now."""

    hashes: Hashes


@dataclass(frozen=True, slots=True)
class RaiseFence:
    """Pass this fence to the following stages."""

    fence: Fence


@dataclass(frozen=True, slots=True)
class Confirm:
    """Carry this message to the distributor of `stage` on a worker (which may be this one)."""

    to: Worker
    stage: str
    message: Fenced


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Save the operators' state as part of this snapshot, then pass the barrier on."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class Advance:
    """Announce this frontier to the operators; `MAX` ends them."""

    frontier: int


@dataclass(frozen=True, slots=True)
class Started:
    """Report: this worker has heard of the rescale to this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Completed:
    """Report: this worker has completed the rescale to this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Left:
    """Report: `worker` (this one, or a peer that sent `Leave`) is no longer part of the stage."""

    worker: Worker


Command = (
    Process
    | Send
    | Interrogate
    | Collect
    | Take
    | Drop
    | RaiseFence
    | Confirm
    | Snapshot
    | Advance
    | Started
    | Completed
    | Left
)
