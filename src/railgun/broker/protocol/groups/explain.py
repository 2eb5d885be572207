"""Explanation of why a group receives nothing, derived from its state, for operators.

`explain` reports the first cause that applies; the figures beside it show the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from railgun.broker.protocol.groups.messages import Member
from railgun.broker.protocol.groups.parts import UNBOUNDED
from railgun.broker.protocol.groups.state import State


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a group is doing or waiting for. `code` is for programs, `text` for people."""

    code: str
    text: str
    floor: int  # the lowest offset that is not settled
    end: int  # one past the stream's last offset
    members: int
    active: Member | None
    credit: int  # free credit of the members that may receive
    in_flight: int
    ready: int  # waiting or new
    delayed: int
    letters: int  # dead letters waiting to be written
    epoch: int

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


def _seconds(us: int) -> str:
    """Return a duration in microseconds as text.

    >>> _seconds(90_000_000), _seconds(1_234_567), _seconds(490), _seconds(-5)
    ('90 s', '1.235 s', 'less than 0.001 s', '0 s')
    """
    if 0 < us < 1_000:
        return "less than 0.001 s"
    return f"{round(max(0, us) / 1e6, 3):.10g} s"


def explain(state: State, blocked: int, now: int) -> Explanation:
    """Return why nothing is delivered, or that messages are. `blocked`: nothing is delivered from this offset on."""
    parties = list(state.members.values())
    receivers = parties if not state.config.exclusive else [p for p in parties if p is state.active]
    credit = sum(max(0, party.free) for party in receivers)
    in_flight = sum(party.flights.total for party in parties)
    ready = state.ready_below(state.readable)
    letters = state.dead.total + len(state.proposed)
    flying = f"{in_flight} messages are in flight"
    until = min((standing.until for _, _, standing in state.delayed), default=now)
    delay = f"{state.delayed.total} messages are delayed, the first for {_seconds(until - now)}"
    writing = f"{letters} messages wait for their letters to be written"
    if not parties:
        code, text = "NO_MEMBERS", "no consumer is in the group"
    elif now < state.pause[0]:
        code = "BLOCKED"
        text = f"a nack blocks the group for another {_seconds(state.pause[0] - now)}; {flying}"
    elif blocked != state.readable:
        code = "PAUSED"
        cause = delay if state.delayed.first == blocked else writing
        text = f"exclusive, and nothing from offset {blocked} on is delivered: {cause}"
    elif ready and not credit:
        code = "NO_CREDIT"
        text = f"{ready} messages are ready, and no member has free credit; {flying}"
    elif ready:
        code, text = "READY", f"{ready} messages are ready and will be delivered; {flying}"
    elif state.delayed:
        code, text = "DELAYED", delay
    elif letters:
        code, text = "LETTERS", writing
    elif state.readable != UNBOUNDED:
        code = "DAMAGED"
        text = f"the log of the stream is damaged: nothing from offset {state.readable} on can be read; {flying}"
    elif in_flight:
        code, text = "WAITING_FOR_ACKS", f"{flying}, and there are no others"
    else:
        code, text = "AT_END", f"the group has finished with everything up to {state.end}"
    active = state.active.name if state.active is not None else None
    return Explanation(
        code, text, state.floor, state.end, len(parties), active, credit, in_flight, ready,
        state.delayed.total, letters, state.epoch,
    )  # fmt: skip
