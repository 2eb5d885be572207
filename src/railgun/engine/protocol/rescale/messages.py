"""The vocabulary of the distributor: events it is told, messages it exchanges, commands it gives.

The driver of a `Distributor` has these duties:

1. Feed events one at a time; carry out the returned commands in order before the next event.
2. Keep links first-in-first-out, and give each message to the peer's distributor of the same stage, as
   `Received(sender, message)`.
3. Answer `Interrogate` with `Interrogated`, naming every key that has state and leaves (`Migration.leaving`), and
   `Collect` with `Collected`. It may take its time: the distributor copes with anything in between. Keys leave in the
   order in which they are named, so name them as they lie in memory. To sort many takes long: do it elsewhere.
4. Give `Move` while `movable`; how many keys at once is the driver's choice (pace against time held).
5. On `RaiseFence` pass the fence as `PassFence` to the distributor of each stage that follows, and carry each
   `Confirm` to the worker it names, as `Received(self, fenced)` for the distributor of that stage.
6. Let state remember whether its key has ended (`Advance(MAX)`): a key that ended before it moved has ended,
   one that had not ends at its new owner.
7. Where operators emit on their own (readers do), tell `Bound` after every `Process` and `Take`, when it rises, and
   when they fall idle or wake: before they emit.
8. On `Snapshot` save the operators' state, then pass the barrier to the stages that follow.
9. Let a worker that joins send nothing older than what any member of the stage has been told by then; it has
   nothing but what moves to it, so this comes by itself where sources obey rule 13.
10. End the machine with its generation after a `ProtocolError`, and the links with it: nothing of what came
   before a rollback may reach a machine made after it.
11. Begin no rescale of a stage while a snapshot is on its way through it, and no snapshot until every worker
   has heard of the rescale (`Coordinator` keeps this).
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
    """Records routed by the sender itself, by the placement of this epoch.

    To a receiver in motion from epoch e to e+1 they are OLD with epoch e, and NEW with epoch e+1.
    """

    epoch: int
    batch: Batch


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """FWD: records that came to the home of their keys and go on to the new owner."""

    epoch: int
    batch: Batch


@dataclass(frozen=True, slots=True, eq=False)
class Acquire:
    """The state of a chunk of keys, for their new owner.

    A key comes once, in no order of its hash; the chunks of a home are numbered from 1.
    """

    epoch: int
    chunk: int
    hashes: Hashes
    state: Any


@dataclass(frozen=True, slots=True)
class Heard:
    """The sender knows of the rescale to this epoch; what it sent before was sent without knowing.

    `told` is the frontier its operators had been told by then.
    """

    epoch: int
    told: int


@dataclass(frozen=True, slots=True)
class Done:
    """The sender, a home, has no more keys to give."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Flush:
    """The sender sends nothing more to the receiver as a home."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """The sender, a home, has forwarded everything it ever gets from `origin`."""

    epoch: int
    origin: Worker


@dataclass(frozen=True, slots=True)
class Bar1:
    """The cut of a snapshot in what the sender sends; it may still forward for others."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class Bar2:
    """The cut of a snapshot in all that comes from the sender."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class Frontier:
    """The sender's own upstream has come to this time. `epoch` is the last one it has heard of."""

    epoch: int
    value: int


@dataclass(frozen=True, slots=True)
class Relay:
    """The sender, a home, forwards nothing below this time any more."""

    epoch: int
    value: int


@dataclass(frozen=True, slots=True)
class Emission:
    """No operator of the sender emits below this time any more, in this epoch; `LAST`: they are idle."""

    epoch: int
    value: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Stands behind everything a home of `stage` emitted for the keys of a chunk.

    Chunk 0 stands for all keys the home never had state for.
    """

    stage: str
    epoch: int
    home: Worker
    chunk: int
    owners: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Fenced:
    """The sender has seen that fence: what the home emitted before it can be overtaken no more."""

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
    """The worker's own upstream has come to this time; `MAX`: it has ended."""

    value: int


@dataclass(frozen=True, slots=True)
class StartSnapshot:
    """The barrier of a snapshot has come from the worker's own upstream."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class PassFence:
    """The stage before, on this worker, raised a fence."""

    fence: Fence


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a link."""

    sender: Worker
    message: Message


@dataclass(frozen=True, slots=True)
class Join:
    """These workers are part of the stage from now on; they own no key before a rescale says so."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Depart:
    """Leave the stage as soon as this worker has no keys and its upstream has ended."""


@dataclass(frozen=True, slots=True)
class Rescale:
    """Move to this placement."""

    epoch: int
    placement: Placement


@dataclass(frozen=True, slots=True, eq=False)
class Interrogated:
    """The operators' answer: all keys that have state and leave, in the order in which they are to do so."""

    named: Order


@dataclass(frozen=True, slots=True)
class Move:
    """Leave to move up to so many keys now."""

    keys: int = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The operators' answer: the state of each part that `Collect` named, in its order."""

    states: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """The earliest time the operators may emit at on their own (readers do).

    `MAX`: never again. `LAST`: they are idle, and nobody should wait for them; what they emit when they wake is
    late if time has gone past it meanwhile.
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

    `turns`: of each part the places of its keys in the order in which all leave. It is that of `Interrogated`; after
    those named there come those that were not.
    """

    parts: tuple[tuple[Worker, Hashes], ...]
    frontier: int
    turns: tuple[Turns, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Give this state, from another worker, to the operators."""

    hashes: Hashes
    state: Any


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """These keys live elsewhere now: forget their state."""

    hashes: Hashes


@dataclass(frozen=True, slots=True)
class RaiseFence:
    """Pass this fence to the stages that follow."""

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
    """Tell the operators that time has come so far; `MAX` ends them."""

    frontier: int


@dataclass(frozen=True, slots=True)
class Started:
    """Report: this worker has heard of the rescale to this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Completed:
    """Report: this worker is through with the rescale to this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Left:
    """Report: `worker` is no longer part of the stage (itself, or a peer that said so)."""

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
