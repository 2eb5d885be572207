"""Track all streams of a source and the workers that own them: the controller's side.

| event                | unknown            | inactive(por)    | active(owner, base)                    | left(seen)         |
|----------------------|--------------------|------------------|----------------------------------------|--------------------|
| notify from x        | grant NONE → active| grant por → active | same owner and session: again; else reject, want it | reject, hasten |
| relinquish from x    | –                  | –                | x is its owner: → inactive(por)        | –                  |
| x leaves             | –                  | –                | x is its owner: → left(what it saw)    | –                  |
| snapshot n           | –                  | por              | what the owner recorded, or else base  | seen               |
| n is committed       | –                  | –                | –                                      | in n: → inactive   |
| the flow goes to n   | forgotten, unless in n | inactive(por of n) | inactive(por of n)               | inactive(por of n) |

1. A message of another generation of the flow, or of a process that is no member, is dropped.
2. An answer does not depend on the worker that asks.
3. A worker that leaves hands over the last ids it saw of its streams. The streams are free with the next snapshot, as
   if the worker had stayed: so all messages of a stream between two snapshots are of one worker.
4. When the flow goes back, the registry is restored before any worker goes on.
"""  # noqa: E501  (a table)

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from railgun.engine.protocol.ingest.messages import (
    NONE,
    FromRegistry,
    Grant,
    Hasten,
    Owner,
    Reject,
    Want,
)


@dataclass(frozen=True, slots=True)
class Inactive:
    """A stream that no worker owns."""

    por: int


@dataclass(frozen=True, slots=True)
class Active:
    """A stream that a worker owns, for a session; it went on after `base`."""

    owner: Owner
    session: int
    base: int


@dataclass(frozen=True, slots=True)
class Left:
    """A stream whose owner has left; `inside` is the snapshot that holds what the owner saw, if one is under way."""

    seen: int
    inside: int | None = None


Stream: TypeAlias = Inactive | Active | Left


class Registry:
    """The streams of one source."""

    __slots__ = ("generation", "members", "streams")

    def __init__(self) -> None:
        self.generation = -1
        self.members: set[Owner] = set()
        self.streams: dict[str, Stream] = {}

    # ------------------------------------------------------------ workers

    def joined(self, owner: Owner) -> None:
        """Add a worker's process as a member."""
        self.members.add(owner)

    def left(self, owner: Owner, generation: int, seen: Mapping[str, int]) -> None:
        """Remove a worker that left in good order; `seen` has the last id it saw of each of its streams."""
        if generation != self.generation or owner not in self.members:
            return
        self.members.discard(owner)
        for name, stream in self.streams.items():
            if isinstance(stream, Active) and stream.owner == owner:
                self.streams[name] = Left(seen.get(name, stream.base))

    def notify(self, owner: Owner, generation: int, name: str, session: int) -> list[FromRegistry]:
        """Answer a worker whose connector wants to send the stream `name`."""
        if generation != self.generation or owner not in self.members:
            return []
        match self.streams.get(name, Inactive(NONE)):
            case Inactive(por):
                self.streams[name] = Active(owner, session, por)
                return [Grant(owner, name, session, por)]
            case Active(current_owner, current_session, base) if (
                current_owner,
                current_session,
            ) == (owner, session):
                return [Grant(owner, name, session, base)]
            case Active(current_owner):
                return [Reject(owner, name, session), Want(current_owner, name)]
            case Left():
                return [Reject(owner, name, session), Hasten()]

    def relinquish(self, owner: Owner, generation: int, name: str, por: int) -> None:
        """Take back a stream from its owner; it goes on after `por`."""
        stream = self.streams.get(name)
        if generation == self.generation and isinstance(stream, Active) and stream.owner == owner:
            self._rest(name, por)

    def _rest(self, name: str, por: int) -> None:
        if por == NONE:
            del self.streams[name]  # nothing of the stream ever came: forget it
        else:
            self.streams[name] = Inactive(por)

    # ------------------------------------------------------------ snapshots

    def snapshot(self, number: int, recorded: Mapping[Owner, Mapping[str, int]]) -> dict[str, int]:
        """Return the position of each stream in snapshot `number`, given the positions that workers recorded."""
        positions: dict[str, int] = {}
        for name, stream in self.streams.items():
            match stream:
                case Inactive(por):
                    positions[name] = por
                case Active(owner, _, base):
                    positions[name] = recorded.get(owner, {}).get(name, base)
                case Left(seen):
                    positions[name] = seen
                    self.streams[name] = Left(seen, number)
        return {name: por for name, por in positions.items() if por != NONE}

    def committed(self, number: int) -> None:
        """Free the streams of workers that left, if this committed snapshot holds what they saw."""
        for name, stream in list(self.streams.items()):
            if isinstance(stream, Left) and stream.inside is not None and stream.inside <= number:
                self._rest(name, stream.seen)

    def go_back(
        self, generation: int, positions: Mapping[str, int], members: Iterable[Owner]
    ) -> None:
        """Begin a generation of the flow with the positions that a snapshot holds."""
        self.generation = generation
        self.members = set(members)
        self.streams = {name: Inactive(por) for name, por in positions.items()}
