"""Mutants of `engine.protocol.ingest`: one rule changed, which `exploration` must find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from railgun.engine.protocol.ingest.messages import (
    NONE,
    Acknowledge,
    Answer,
    FromRegistry,
    FromTable,
    Grant,
    Owner,
    Reason,
    Relinquish,
)
from railgun.engine.protocol.ingest.registry import Active, Inactive, Left, Registry
from railgun.engine.protocol.ingest.sender import Sender, Sent
from railgun.engine.protocol.ingest.table import Entry, Ids, State, Table
from verification.ingest.exploration import Case, Rules, explore
from verification.mutation import Verdict, registrar, verdict_of

Kind = TypeVar("Kind", bound=type[Table] | type[Registry] | type[Sender])

MUTANTS: dict[str, tuple[Rules, Case]] = {}
"""The mutants: the changed rule, the machines, and a case that shows the violation."""

PLAIN = Case(messages=2, closes=1)
CRASH = Case(messages=1, closes=0, crashes=1)
FAILING = Case(messages=1, closes=1, failures=True)
SHRINK = Case(messages=1, closes=0, shrinks=1)
STRAGGLER = Case(workers=1, messages=1, closes=1, crashes=1, late=True)
RACE = Case(messages=2, connectors=2, closes=0)


def mutant(case: Case) -> Callable[[Kind], Kind]:
    """Register a mutant under the first line of its docstring; `case` shows the violation."""

    def entry(kind: Kind) -> tuple[Rules, Case]:
        field = next(
            name
            for name, base in (("table", Table), ("registry", Registry), ("sender", Sender))
            if issubclass(kind, base)
        )
        rules: dict[str, Any] = {field: kind}
        return Rules(**rules), case

    return registrar(MUTANTS, entry)


def hunt(name: str) -> Verdict:
    """Explore the case of the mutant called `name`."""
    rules, case = MUTANTS[name]
    return verdict_of(name, explore(case, rules))


# ---------------------------------------------------------------- the worker's table


class _ReleasesAtClose(Table):
    """A table that lets streams go when their connection is lost."""

    __slots__ = ()

    def closed(self, session: int) -> list[FromTable]:
        gone = self.sessions.pop(session).streams
        mine = [s for s in gone if s in self.entries and self.entries[s].session == session]
        return [Relinquish(stream, self.por(self.entries.pop(stream))) for stream in mine]

    def por(self, entry: Entry) -> int:
        raise NotImplementedError


@mutant(PLAIN)
class ReleaseWithAcked(_ReleasesAtClose):
    """A stream is released at close, with the last acknowledged position."""

    __slots__ = ()

    def por(self, entry: Entry) -> int:
        return entry.acknowledged


@mutant(Case(messages=1, closes=1, crashes=1))
class ReleaseWithSeen(_ReleasesAtClose):
    """A stream is released at close, with the last seen position."""

    __slots__ = ()

    def por(self, entry: Entry) -> int:
        return entry.seen


@mutant(Case(messages=1, closes=1))
class KeepLateGrant(Table):
    """A grant that comes after its session died is not given back."""

    __slots__ = ()

    def granted(self, stream: str, session: int, por: int) -> list[FromTable]:
        out = super().granted(stream, session, por)
        return [command for command in out if not isinstance(command, Relinquish)]


@mutant(PLAIN)
class ResumeAtAcked(Table):
    """A connector that comes back to the worker continues after its last safe message."""

    __slots__ = ()

    def notify(self, session: int, stream: str) -> list[FromTable]:
        entry = self.entries.get(stream)
        if entry is not None and entry.state is State.DETACHED:
            entry.seen = entry.acknowledged
        return super().notify(session, stream)


@mutant(FAILING)
class LeaveWithAnySnapshot(Table):
    """A stream leaves with a snapshot that began before its connection was lost."""

    __slots__ = ()

    def settled(self, snapshot: int, committed: bool) -> list[FromTable]:
        for entry in self.entries.values():
            entry.after = min(entry.after, snapshot)
        return super().settled(snapshot, committed)


@mutant(FAILING)
class LeaveWithFailedSnapshot(Table):
    """A stream leaves with a snapshot that is given up."""

    __slots__ = ()

    def settled(self, snapshot: int, committed: bool) -> list[FromTable]:
        return super().settled(snapshot, True)


@mutant(PLAIN)
class ApplyAgain(Table):
    """An id that was seen before is applied again."""

    __slots__ = ()

    def notify(self, session: int, stream: str) -> list[FromTable]:
        out = super().notify(session, stream)
        entry = self.entries.get(stream)
        if entry is not None and entry.state is State.OPEN:
            return [Answer(session, stream, Reason.OK, NONE)]
        return out

    def message(self, session: int, stream: str, ids: Ids) -> int:
        super().message(session, stream, ids)
        return 0


@mutant(PLAIN)
class NeverLeave(Table):
    """A stream whose connection is lost never leaves."""

    __slots__ = ()

    def settled(self, snapshot: int, committed: bool) -> list[FromTable]:
        out = super().settled(snapshot, committed)
        return [command for command in out if not isinstance(command, Relinquish)]


@mutant(SHRINK)
class DrainForgets(Table):
    """A worker that drains forgets its streams."""

    __slots__ = ()

    def drain(self) -> list[FromTable]:
        out = super().drain()
        self.entries = {}
        return out


@mutant(SHRINK)
class DrainKeepsReading(Table):
    """Streams that are pending when a worker drains are opened nevertheless."""

    __slots__ = ()

    def drain(self) -> list[FromTable]:
        asking = {n: e for n, e in self.entries.items() if e.state is State.PENDING}
        sessions = {
            e.session: self.sessions[e.session]
            for e in asking.values()
            if e.session in self.sessions
        }
        self.entries = {n: e for n, e in self.entries.items() if n not in asking}
        self.sessions = {n: s for n, s in self.sessions.items() if n not in sessions}
        out = super().drain()
        self.entries |= asking
        self.sessions = sessions
        return out


@mutant(PLAIN)
class NeverAcknowledge(Table):
    """Nothing is ever acknowledged."""

    __slots__ = ()

    def settled(self, snapshot: int, committed: bool) -> list[FromTable]:
        out = super().settled(snapshot, committed)
        return [command for command in out if not isinstance(command, Acknowledge)]


@mutant(PLAIN)
class AcknowledgeSeen(Table):
    """Seen messages are acknowledged, and not those that the snapshot recorded."""

    __slots__ = ()

    def settled(self, snapshot: int, committed: bool) -> list[FromTable]:
        self.recorded = {name: entry.seen for name, entry in self.entries.items()}
        return super().settled(snapshot, committed)


@mutant(PLAIN)
class ToldBefore(Table):
    """A connector that comes back does not hear the acknowledgements of its predecessor."""

    __slots__ = ()

    def _open(self, entry: Entry, session: int, stream: str) -> None:
        acknowledged = entry.acknowledged
        super()._open(entry, session, stream)
        entry.acknowledged = max(acknowledged, entry.seen)


# ---------------------------------------------------------------- the controller's registry


@mutant(CRASH)
class NoGeneration(Registry):
    """The registry accepts messages of an older generation."""

    __slots__ = ()

    def notify(self, owner: Owner, generation: int, name: str, session: int) -> list[FromRegistry]:
        return super().notify(owner, self.generation, name, session)

    def relinquish(self, owner: Owner, generation: int, name: str, por: int) -> None:
        super().relinquish(owner, self.generation, name, por)


@mutant(STRAGGLER)
class NoProcess(NoGeneration):
    """The registry accepts messages of an older generation: it checks the worker's name, not its process."""

    __slots__ = ()

    def notify(self, owner: Owner, generation: int, name: str, session: int) -> list[FromRegistry]:
        return super().notify(self._present(owner), generation, name, session)

    def relinquish(self, owner: Owner, generation: int, name: str, por: int) -> None:
        super().relinquish(self._present(owner), generation, name, por)

    def _present(self, owner: Owner) -> Owner:
        return next((member for member in self.members if member[0] == owner[0]), owner)


@mutant(PLAIN)
class ForgetsBase(Registry):
    """A snapshot without a report of the owner of a stream holds nothing of the stream."""

    __slots__ = ()

    def snapshot(self, number: int, recorded: Mapping[Owner, Mapping[str, int]]) -> dict[str, int]:
        positions = super().snapshot(number, recorded)
        for name, stream in self.streams.items():
            if isinstance(stream, Active) and name not in recorded.get(stream.owner, {}):
                positions.pop(name, None)
        return positions


@mutant(CRASH)
class KeepsPositions(Registry):
    """When the flow goes back, the registry stays as it is."""

    __slots__ = ()

    def go_back(
        self, generation: int, positions: Mapping[str, int], members: Iterable[Owner]
    ) -> None:
        held = {n: s.por for n, s in self.streams.items() if isinstance(s, Inactive)}
        based = {n: s.base for n, s in self.streams.items() if isinstance(s, Active)}
        super().go_back(generation, {**positions, **based, **held}, members)


@mutant(CRASH)
class KeepsOwners(Registry):
    """When the flow goes back, streams stay with their owners."""

    __slots__ = ()

    def go_back(
        self, generation: int, positions: Mapping[str, int], members: Iterable[Owner]
    ) -> None:
        active = {n: s for n, s in self.streams.items() if isinstance(s, Active)}
        super().go_back(generation, positions, members)
        self.streams.update(active)


@mutant(RACE)
class GrantsTwice(Registry):
    """A stream is granted to the last worker that asks."""

    __slots__ = ()

    def notify(self, owner: Owner, generation: int, name: str, session: int) -> list[FromRegistry]:
        stream = self.streams.get(name)
        if isinstance(stream, Active):
            self.streams[name] = Active(owner, session, stream.base)
            return [Grant(owner, name, session, stream.base)]
        return super().notify(owner, generation, name, session)


@mutant(SHRINK)
class LeftIsFree(Registry):
    """The streams of a worker that left continue from where the worker began."""

    __slots__ = ()

    def left(self, owner: Owner, generation: int, seen: Mapping[str, int]) -> None:
        super().left(owner, generation, {})


@mutant(Case(workers=1, messages=1, closes=0, shrinks=1))
class LeftForEver(Registry):
    """The streams of a worker that left are never free."""

    __slots__ = ()

    def committed(self, number: int) -> None:
        pass


@mutant(Case(messages=1, closes=0, shrinks=1, failures=True, crashes=1))
class LeftAtOnce(Registry):
    """The streams of a worker that left are free at once, and forgotten."""

    __slots__ = ()

    def left(self, owner: Owner, generation: int, seen: Mapping[str, int]) -> None:
        super().left(owner, generation, seen)
        self.streams = {n: s for n, s in self.streams.items() if not isinstance(s, Left)}


# ---------------------------------------------------------------- the connector's sender


@mutant(CRASH)
class NoRewind(Sender):
    """A connector continues from where it was, whatever the answer says."""

    __slots__ = ()

    def granted(self, stream: Sent, por: int) -> None:
        at = stream.at
        super().granted(stream, por)
        stream.at = max(at, por)
