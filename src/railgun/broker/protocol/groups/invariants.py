"""Invariants of a group, checked after each step in tests.

Every offset from the floor to `next` is in exactly one place, and every message that waits for a time has a timer.
"""

from __future__ import annotations

from collections.abc import Iterable

from railgun.broker.protocol.groups.parts import UNBOUNDED
from railgun.broker.protocol.groups.state import State
from railgun.errors import ProtocolError


def check(state: State) -> None:
    """Raise `ProtocolError` if the state violates an invariant."""
    _check_places(state)
    _check_timers(state)
    if state.config.exclusive:
        _check_exclusive(state)
    most = state.config.max_deliveries
    for place in (state.waiting, state.delayed):
        for first, _, standing in place:
            _must(
                most is None or standing.failures < most,
                f"{first} has failed {standing.failures} times, and would be delivered again",
            )
            _must(
                state.old_at <= state.too_old_at(standing),
                f"no timer is set for the age of {first}",
            )
            _must(first >= state.first, f"{first} would be delivered, but the stream lost it")
    _must(not state.missed, "missed messages were not reported")


def _check_places(state: State) -> None:
    spans: list[tuple[int, int, str]] = []
    spans += _named(state.settled, "settled")
    spans += _named(state.waiting, "waiting")
    spans += _named(state.delayed, "delayed")
    spans += _named(state.dead, "dead")
    spans += [(offset, offset + 1, "proposed") for offset in state.proposed]
    for party in state.members.values():
        spans += _named(party.flights, f"with {party.name}")
        _must(party.credit >= 0, f"{party.name} has a credit below 0")
    at = state.floor
    for first, end, where in sorted(spans):
        _must(first == at, f"{where} [{first}, {end}) does not follow what ends at {at}")
        at = end
    _must(at == state.next, f"places end at {at}, and new messages begin at {state.next}")
    _must(state.next <= state.end, f"{state.next} is beyond the end {state.end}")
    _must(state.settled.first != state.floor, "the floor is below finished messages")
    _must(state.highest < state.next, "a message was acked that was never delivered")


def _named(pieces: Iterable[tuple[int, int, object]], where: str) -> list[tuple[int, int, str]]:
    return [(first, end, where) for first, end, _ in pieces]


def _check_timers(state: State) -> None:
    """Check that every message with a time is covered by a timer that is not later."""
    timers = state.timers
    for first, end, standing in state.delayed:
        timely = [t for t in timers if not t.member and t.at <= standing.until]
        _must(_covered(first, end, timely), f"no timer covers the delayed [{first}, {end})")
    for party in state.members.values():
        for first, end, flight in party.flights:
            if flight.expires is None:
                _must(state.config.ack_wait is None, f"[{first}, {end}) would never expire")
                continue
            spans = [(at, *span, "") for at, span in party.spans.items() if at <= flight.expires]
            _must(_covered(first, end, spans), f"no timer covers the flight [{first}, {end})")
        set_for = {timer.at for timer in timers if timer.member == party.name}
        _must(set_for >= party.spans.keys(), f"a timer of {party.name} was never set")


def _covered(first: int, end: int, spans: Iterable[tuple[int, int, int, str]]) -> bool:
    for _, low, high, _ in sorted(spans, key=lambda span: span[1]):
        if low <= first < high:
            first = high
    return first >= end


def _check_exclusive(state: State) -> None:
    """Check that only one member has messages, and that they are all below those still to be delivered."""
    _must((state.active is None) == (not state.members), "no member, or an unknown one, is active")
    top = -1
    for party in state.members.values():
        _must(party is state.active or not party.flights, f"{party.name} is not active")
        top = max(top, (party.flights.end or 0) - 1)
    lows = [state.waiting.first, state.delayed.first, state.dead.first]
    low = min([low for low in lows if low is not None] + [*state.proposed], default=UNBOUNDED)
    _must(top < low, f"{top} is in flight, but {low} must come before it")


def _must(holds: bool, message: str) -> None:
    if not holds:
        raise ProtocolError(f"group: {message}")
