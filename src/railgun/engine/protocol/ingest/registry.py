"""All streams of a source, and who has them: the controller's side.

| event                | unknown            | inactive(por)    | active(owner, base)                    | left(seen)         |
|----------------------|--------------------|------------------|----------------------------------------|--------------------|
| notify from x        | grant NONE → active| grant por → active | same owner and session: again; else reject, want it | reject, hasten |
| relinquish from x    | –                  | –                | x is its owner: → inactive(por)        | –                  |
| x leaves             | –                  | –                | x is its owner: → left(what it saw)    | –                  |
| snapshot n           | –                  | por              | what the owner recorded, or else base  | seen               |
| n is committed       | –                  | –                | –                                      | in n: → inactive   |
| the flow goes to n   | forgotten, unless in n | inactive(por of n) | inactive(por of n)               | inactive(por of n) |

1. What is of another generation of the flow, or of a process that is no member, is dropped.
2. An answer does not depend on who asks.
3. A worker that leaves hands over what it saw of its streams. They are free with the next snapshot, as if it had stayed:
   so all messages of a stream between two snapshots are of one worker.
4. When the flow goes back, this is restored before any worker goes on.
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
    """Nobody has it."""

    por: int


@dataclass(frozen=True, slots=True)
class Active:
    """A worker has it, for a session; it went on after `base`."""

    owner: Owner
    session: int
    base: int


@dataclass(frozen=True, slots=True)
class Left:
    """The worker that had it is gone; `inside`: the snapshot that holds what it saw, if one is under way."""

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
        """A worker takes part."""
        self.members.add(owner)

    def left(self, owner: Owner, generation: int, seen: Mapping[str, int]) -> None:
        """A worker is gone in good order; what it saw of its streams."""
        if generation != self.generation or owner not in self.members:
            return
        self.members.discard(owner)
        for name, stream in self.streams.items():
            if isinstance(stream, Active) and stream.owner == owner:
                self.streams[name] = Left(seen.get(name, stream.base))

    def notify(self, owner: Owner, generation: int, name: str, session: int) -> list[FromRegistry]:
        """A connector wants to send a stream to this worker."""
        if generation != self.generation or owner not in self.members:
            return []
        match self.streams.get(name, Inactive(NONE)):
            case Inactive(por):
                self.streams[name] = Active(owner, session, por)
                return [Grant(owner, name, session, por)]
            case Active(who, known, base) if (who, known) == (owner, session):
                return [Grant(owner, name, session, base)]
            case Active(who):
                return [Reject(owner, name, session), Want(who, name)]
            case Left():
                return [Reject(owner, name, session), Hasten()]

    def relinquish(self, owner: Owner, generation: int, name: str, por: int) -> None:
        """A worker has a stream no more."""
        stream = self.streams.get(name)
        if generation == self.generation and isinstance(stream, Active) and stream.owner == owner:
            self._rest(name, por)

    def _rest(self, name: str, por: int) -> None:
        if por == NONE:
            del self.streams[name]  # as if it had never been
        else:
            self.streams[name] = Inactive(por)

    # ------------------------------------------------------------ snapshots

    def snapshot(self, number: int, recorded: Mapping[Owner, Mapping[str, int]]) -> dict[str, int]:
        """What a snapshot holds of each stream, by what workers recorded."""
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
        """A snapshot is committed."""
        for name, stream in list(self.streams.items()):
            if isinstance(stream, Left) and stream.inside is not None and stream.inside <= number:
                self._rest(name, stream.seen)

    def go_back(
        self, generation: int, positions: Mapping[str, int], members: Iterable[Owner]
    ) -> None:
        """A generation of the flow begins, with what a snapshot holds."""
        self.generation = generation
        self.members = set(members)
        self.streams = {name: Inactive(por) for name, por in positions.items()}
