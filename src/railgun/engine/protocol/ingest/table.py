"""Track the streams of one worker: which are open here, their positions, and when they may leave.

`seen` is the id of the last message that was applied. Rules:

1. **A stream leaves only with a snapshot.** When its connector is done, or its connection is lost, the stream stays
   here until a snapshot is committed that began after that. If it left at once with the acknowledged id, messages
   would come twice; with the seen id, they would be lost when the flow goes back. A connector that comes back to
   this worker meanwhile goes on after what was seen. A stream without any messages has nothing to repeat or to lose:
   it is given back when its connection is lost.
2. **A grant that comes too late is given back:** the connector that asked has gone, and no other would ever get it.
3. **An id at or below `seen`** was applied before, and is dropped.
4. **Acknowledged** is what a snapshot recorded, once it is committed. A snapshot that fails changes nothing.
5. A worker that is to leave *drains*: it takes no more messages, and sends connectors elsewhere. When it leaves, it
   hands over the positions of its streams.
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
    """The state of a stream on this worker; a stream without an entry is absent."""

    PENDING = "pending"
    OPEN = "open"
    CLOSING = "closing"
    DETACHED = "detached"


@dataclass(slots=True)
class Entry:
    """The state and position of a stream that is not absent."""

    state: State
    session: int
    seen: int = NONE
    after: int = 0  # the first snapshot with which the stream may leave
    acknowledged: int = NONE  # the last id acknowledged to this session


@dataclass(slots=True)
class Session:
    """A connected connector, and the streams it has open."""

    streams: dict[str, None] = field(default_factory=dict)


class Table:
    """The streams of one source on one worker, in one generation of the flow."""

    __slots__ = ("begun", "draining", "entries", "recorded", "sessions")

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.sessions: dict[int, Session] = {}
        self.begun = 0  # the last snapshot that began here
        self.recorded: dict[str, int] = {}  # positions in that snapshot
        self.draining = False

    # ------------------------------------------------------------ connectors

    def opened(self, session: int) -> None:
        """Add the session of a connector that has connected."""
        self.sessions[session] = Session()

    def notify(self, session: int, stream: str) -> list[FromTable]:
        """Answer a connector that wants to send a stream, or ask the controller for it."""
        if self.draining:
            return [Answer(session, stream, Reason.REDIRECT)]
        entry = self.entries.get(stream)
        if entry is None:
            self.entries[stream] = Entry(State.PENDING, session)
            return [Ask(stream, session)]
        if entry.state is State.DETACHED:
            self._open(entry, session, stream)
            return [Answer(session, stream, Reason.OK, entry.seen)]
        # A stream that has ended is free after the next snapshot, for any connector that asks.
        return [Answer(session, stream, Reason.BUSY_RETRY), *self.wanted(stream)]

    def message(self, session: int, stream: str, ids: Ids) -> int:
        """Apply messages of these ids; return how many of them, from the first on, were applied before.

        Raise `SessionError` if they cannot be applied.
        """
        entry = self.check(session, stream, ids)
        before = 0 if ids[0] > entry.seen else int(np.searchsorted(ids, entry.seen, "right"))
        entry.seen = max(entry.seen, int(ids[-1]))
        return before

    def check(self, session: int, stream: str, ids: Ids) -> Entry:
        """Return the entry of a stream; raise `SessionError` if messages of these ids cannot be applied."""
        entry = self._of(session, stream, "a message")
        if ids[0] < 0 or (len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all())):
            raise SessionError("BAD_IDS", f"ids of {stream!r} have to go up, from 0 on", stream)
        return entry

    def end(self, session: int, stream: str, last: int) -> None:
        """Close a stream whose last message has the id `last`; raise `SessionError` if messages are missing."""
        entry = self._of(session, stream, "its end")
        if last > entry.seen:
            raise SessionError(
                "BAD_IDS",
                f"the end of {stream!r} names {last} as the last id, but {entry.seen} was the last that came",
                stream,
            )
        entry.state, entry.after = State.CLOSING, self.begun + 1

    def closed(self, session: int) -> list[FromTable]:
        """End a session whose connection is lost. Its streams stay, except those without any messages."""
        session_ended = self.sessions.pop(session, None)
        out: list[FromTable] = []
        for stream in session_ended.streams if session_ended is not None else ():
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
        entry.state, entry.session, entry.acknowledged = State.OPEN, session, NONE
        self.sessions[session].streams[stream] = None

    def _of(self, session: int, stream: str, subject: str) -> Entry:
        entry = self.entries.get(stream)
        if entry is None or entry.state is not State.OPEN or entry.session != session:
            raise SessionError(
                "NOT_OPEN", f"{subject} of {stream!r}, which is not open here: notify first", stream
            )
        return entry

    # ------------------------------------------------------------ the controller

    def granted(self, stream: str, session: int, por: int) -> list[FromTable]:
        """Open a stream that the controller grants to this worker; give it back if the session has ended."""
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
        """Refuse a stream to its connector: another worker has it."""
        entry = self.entries.get(stream)
        if entry is None or entry.state is not State.PENDING:
            return []
        del self.entries[stream]
        if session not in self.sessions:
            return []
        return [Answer(session, stream, Reason.BUSY_RETRY)]

    def wanted(self, stream: str) -> list[FromTable]:
        """Take note that another worker's connector wants a stream; ask for a snapshot if that frees it."""
        entry = self.entries.get(stream)
        if entry is not None and entry.state in (State.CLOSING, State.DETACHED):
            return [Hasten()]
        return []

    # ------------------------------------------------------------ snapshots

    def begin(self, snapshot: int) -> dict[str, int]:
        """Begin a snapshot; return the positions it is to record."""
        self.begun = snapshot
        self.recorded = self.positions()
        return self.recorded

    def positions(self) -> dict[str, int]:
        """Return the position of every stream here that has messages."""
        return {stream: entry.seen for stream, entry in self.entries.items() if entry.seen != NONE}

    def settled(self, snapshot: int, committed: bool) -> list[FromTable]:
        """Take note that a snapshot was committed or failed; return acknowledgements and the streams given back."""
        recorded, self.recorded = self.recorded, {}
        if not committed or snapshot != self.begun:
            return []
        points_by_session: dict[int, list[tuple[str, int]]] = {}
        leaving: list[FromTable] = []
        for stream, entry in list(self.entries.items()):
            por = recorded.get(stream, NONE)
            if entry.session in self.sessions and por > entry.acknowledged:
                entry.acknowledged = por
                points_by_session.setdefault(entry.session, []).append((stream, por))
            if entry.state in (State.CLOSING, State.DETACHED) and entry.after <= snapshot:
                del self.entries[stream]
                leaving.append(Relinquish(stream, por))
        return [
            *(Acknowledge(session, tuple(points)) for session, points in points_by_session.items()),
            *leaving,
        ]

    # ------------------------------------------------------------ leaving

    def drain(self) -> list[FromTable]:
        """Prepare to leave: take no more messages, and end all sessions."""
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
