"""The streams of one worker: which are open here, how far they are, and when they may leave.

`seen` is the id of the last message that was applied. Rules:

1. **A stream leaves only with a snapshot.** When its connector is done, or its connection is lost, it stays
   here, until a snapshot is committed that began after that. Left at once with what is acknowledged, messages would
   come twice; with what was seen, they would be lost when the flow goes back. A connector that comes back to
   this worker meanwhile goes on after what was seen. Of a stream of which nothing ever came there is nothing to come
   twice or to be lost: it is given back when its connection is lost.
2. **What is granted too late is given back:** the connector that asked has gone, and nobody else would ever get it.
3. **An id at or below `seen`** was applied before, and is dropped.
4. **Acknowledged** is what a snapshot recorded, when that is committed. One that fails changes nothing.
5. A worker that is to leave *drains*: it takes nothing more, and sends connectors elsewhere. What it has then of streams
   it hands over when it goes.
6. A table is of one generation of the flow. When the flow goes back, table and sessions end.

Sessions are numbers that are never used again.

| event            | absent           | pending            | open(seen)           | closing(seen, after)        | detached(seen, after) |
|------------------|------------------|--------------------|----------------------|-----------------------------|-----------------------|
| notify           | ask → pending    | refuse             | refuse               | refuse, hasten              | grant at seen → open  |
| grant, alive     | give back        | → open(por)        | –                    | –                           | –                     |
| grant, gone      | give back        | give back → absent | –                    | –                           | –                     |
| reject           | –                | refuse → absent    | –                    | –                           | –                     |
| message          | error            | error              | apply if id > seen   | error                       | error                 |
| end of stream    | error            | error              | → closing            | error                       | error                 |
| connection lost  | –                | –                  | → detached; nothing seen: give back → absent | –   | –                     |
| snapshot begins  | –                | –                  | record               | record                      | record                |
| it is committed  | –                | –                  | acknowledge          | if after ≤ n: acknowledge, relinquish → absent | if after ≤ n: relinquish → absent |
| wanted elsewhere | –                | –                  | –                    | hasten                      | hasten                |
| drain            | redirect         | redirect → absent  | restart → detached   | –                           | –                     |
"""  # noqa: E501  (a table)

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from railgun.engine.protocol.ingest.messages import (
    NONE,
    Acknowledge,
    Answer,
    Ask,
    FromTable,
    Hasten,
    Reason,
    Relinquish,
    Restart,
    SessionError,
)

Ids: TypeAlias = NDArray[np.int64]


class State(Enum):
    """What a stream is here; one that is not known is absent."""

    PENDING = "pending"
    OPEN = "open"
    CLOSING = "closing"
    DETACHED = "detached"


@dataclass(slots=True)
class Entry:
    """A stream that is not absent."""

    state: State
    session: int
    seen: int = NONE
    after: int = 0  # the first snapshot with which it may leave
    told: int = NONE  # what this session was told to be committed


@dataclass(slots=True)
class Session:
    """A connector that is connected."""

    streams: dict[str, None] = field(default_factory=dict)


class Table:
    """The streams of one source on one worker, in one generation of the flow."""

    __slots__ = ("begun", "draining", "entries", "recorded", "sessions")

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.sessions: dict[int, Session] = {}
        self.begun = 0  # the last snapshot that began here
        self.recorded: dict[str, int] = {}  # by the one under way
        self.draining = False

    # ------------------------------------------------------------ connectors

    def opened(self, session: int) -> None:
        """A connector has connected."""
        self.sessions[session] = Session()

    def notify(self, session: int, stream: str) -> list[FromTable]:
        """A connector wants to send a stream."""
        if self.draining:
            return [Answer(session, stream, Reason.REDIRECT)]
        entry = self.entries.get(stream)
        if entry is None:
            self.entries[stream] = Entry(State.PENDING, session)
            return [Ask(stream, session)]
        if entry.state is State.DETACHED:
            self._open(entry, session, stream)
            return [Answer(session, stream, Reason.OK, entry.seen)]
        # One that has come to its end is free after the next snapshot, for whoever asks.
        return [Answer(session, stream, Reason.BUSY_RETRY), *self.wanted(stream)]

    def message(self, session: int, stream: str, ids: Ids) -> int:
        """Messages of these ids are to be applied: how many of them, from the first on, were before."""
        entry = self.check(session, stream, ids)
        before = 0 if ids[0] > entry.seen else int(np.searchsorted(ids, entry.seen, "right"))
        entry.seen = max(entry.seen, int(ids[-1]))
        return before

    def check(self, session: int, stream: str, ids: Ids) -> Entry:
        """Raise `SessionError` if messages of these ids cannot be applied."""
        entry = self._of(session, stream, "a message")
        if ids[0] < 0 or (len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all())):
            raise SessionError("BAD_IDS", f"ids of {stream!r} have to go up, from 0 on", stream)
        return entry

    def end(self, session: int, stream: str, last: int) -> None:
        """A connector says that a stream was sent up to this id."""
        entry = self._of(session, stream, "its end")
        if last > entry.seen:
            raise SessionError(
                "BAD_IDS",
                f"the end of {stream!r} is said to be {last}, but {entry.seen} was the last that came",
                stream,
            )
        entry.state, entry.after = State.CLOSING, self.begun + 1

    def closed(self, session: int) -> list[FromTable]:
        """The connection of a session is lost. Its streams stay, but for those of which nothing ever came."""
        gone = self.sessions.pop(session, None)
        out: list[FromTable] = []
        for stream in gone.streams if gone is not None else ():
            entry = self.entries.get(stream)
            if entry is None or entry.session != session or entry.state is not State.OPEN:
                continue
            if entry.seen == NONE:
                del self.entries[stream]
                out.append(Relinquish(stream, NONE))
            else:
                self._detach(entry)
        return out

    def _detach(self, entry: Entry) -> None:
        entry.state, entry.after = State.DETACHED, self.begun + 1

    def _open(self, entry: Entry, session: int, stream: str) -> None:
        entry.state, entry.session, entry.told = State.OPEN, session, NONE
        self.sessions[session].streams[stream] = None

    def _of(self, session: int, stream: str, what: str) -> Entry:
        entry = self.entries.get(stream)
        if entry is None or entry.state is not State.OPEN or entry.session != session:
            raise SessionError(
                "NOT_OPEN", f"{what} of {stream!r}, which is not open here: notify first", stream
            )
        return entry

    # ------------------------------------------------------------ the controller

    def granted(self, stream: str, session: int, por: int) -> list[FromTable]:
        """The controller gives this worker a stream."""
        entry = self.entries.get(stream)
        if entry is not None and entry.state is not State.PENDING:
            return []
        if entry is None or session not in self.sessions:
            self.entries.pop(stream, None)
            return [Relinquish(stream, por)]
        entry.seen = por
        self._open(entry, session, stream)
        return [Answer(session, stream, Reason.OK, por)]

    def rejected(self, stream: str, session: int) -> list[FromTable]:
        """Another worker has it."""
        entry = self.entries.get(stream)
        if entry is None or entry.state is not State.PENDING:
            return []
        del self.entries[stream]
        if session not in self.sessions:
            return []
        return [Answer(session, stream, Reason.BUSY_RETRY)]

    def wanted(self, stream: str) -> list[FromTable]:
        """Another worker's connector wants to send a stream that is here."""
        entry = self.entries.get(stream)
        if entry is not None and entry.state in (State.CLOSING, State.DETACHED):
            return [Hasten()]
        return []

    # ------------------------------------------------------------ snapshots

    def begin(self, snapshot: int) -> dict[str, int]:
        """A snapshot begins here: what it is to record."""
        self.begun = snapshot
        self.recorded = self.positions()
        return self.recorded

    def positions(self) -> dict[str, int]:
        """How far the streams are that are here."""
        return {stream: entry.seen for stream, entry in self.entries.items() if entry.seen != NONE}

    def settled(self, snapshot: int, committed: bool) -> list[FromTable]:
        """A snapshot is committed; or it is not, and will not be."""
        recorded, self.recorded = self.recorded, {}
        if not committed or snapshot != self.begun:
            return []
        told: dict[int, list[tuple[str, int]]] = {}
        leaving: list[FromTable] = []
        for stream, entry in list(self.entries.items()):
            por = recorded.get(stream, NONE)
            if entry.session in self.sessions and por > entry.told:
                entry.told = por
                told.setdefault(entry.session, []).append((stream, por))
            if entry.state in (State.CLOSING, State.DETACHED) and entry.after <= snapshot:
                del self.entries[stream]
                leaving.append(Relinquish(stream, por))
        return [
            *(Acknowledge(session, tuple(points)) for session, points in told.items()),
            *leaving,
        ]

    # ------------------------------------------------------------ leaving

    def drain(self) -> list[FromTable]:
        """This worker is to leave: nothing more is taken, and all sessions end."""
        self.draining = True
        out: list[FromTable] = []
        for stream, entry in list(self.entries.items()):
            if entry.state is State.PENDING:
                del self.entries[stream]
                if entry.session in self.sessions:
                    out.append(Answer(entry.session, stream, Reason.REDIRECT))
            elif entry.state is State.OPEN:
                self._detach(entry)
        out += map(Restart, self.sessions)
        self.sessions = {}
        return out
