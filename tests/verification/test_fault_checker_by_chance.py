"""The checker of histories accuses no system that is right, and every one whose history was changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.verification.fault_records import S, got, right
from verification.faults.anomalies import Kind
from verification.faults.checker import check
from verification.faults.history import (
    Acked,
    Delivery,
    Drain,
    LastRead,
    Position,
    Publish,
    Record,
    Response,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_system_that_is_right_is_not_accused(seed: int) -> None:
    assert check(right(seed)).found == []


def _one(records: list[Record], kind: type, chance: random.Random, fits: Any = bool) -> int:
    places = [n for n, one in enumerate(records) if isinstance(one, kind) and fits(one)]
    return chance.choice(places) if places else -1


def _change(kind: type, fits: Any = bool, **fields: Callable[[Any, list[Record]], Any]) -> Any:
    def change(records: list[Record], chance: random.Random) -> bool:
        at = _one(records, kind, chance, fits)
        if at >= 0:
            found: Any = records[at]
            made = {name: make(found, records) for name, make in fields.items()}
            records[at] = replace(found, **made)
        return at >= 0

    return change


def _again(kind: type, fits: Any = bool, **fields: Callable[[Any, list[Record]], Any]) -> Any:
    def again(records: list[Record], chance: random.Random) -> bool:
        at = _one(records, kind, chance, fits)
        if at >= 0:
            found: Any = records[at]
            made = {name: make(found, records) for name, make in fields.items()}
            records.append(replace(found, **made))
        return at >= 0

    return again


def _drop_from_group(records: list[Record], chance: random.Random) -> bool:
    at = _one(records, Delivery, chance, lambda one: one.group == "g")
    if at < 0:
        return False
    value = records[at].value  # type: ignore[union-attr]
    records[:] = [
        one
        for one in records
        if not (isinstance(one, Delivery) and one.group == "g" and one.value == value)
    ]
    return True


def _late(one: Any, records: list[Record]) -> float:
    return 1e6


CHANGES: dict[str, tuple[set[Kind], Any]] = {
    "a log loses its last message on all nodes": (
        {"lost", "phantom", "never_delivered"},
        lambda records, chance: _cut(records, every=True),
    ),
    "on one node": ({"diverged"}, lambda records, chance: _cut(records, every=False)),
    "a message is another one": (
        {"two_values", "phantom"},
        _change(Delivery, value=lambda one, _: one.value + "?"),
    ),
    "a message is at another offset": (
        {"two_values", "duplicate_id", "duplicate_value"},
        _change(Publish, lambda one: one.safe, offset=lambda one, _: one.offset + 1000),
    ),
    "an unknown publish was refused, and is there": (
        {"failed_read"},
        lambda records, chance: _refuse(records, chance),
    ),
    "a reader gets one again": (
        {"inverted"},
        _again(Delivery, lambda one: not one.group),
    ),
    "an ack was confirmed, and it comes again": (
        {"redelivered"},
        lambda records, chance: _redeliver(records, chance),
    ),
    "a group never gets one": ({"never_delivered"}, _drop_from_group),
    "a group does not finish": (
        {"stuck", "unfinished"},
        _change(Drain, lambda one: one.stream_end > 0, floor=lambda one, _: one.floor - 1),
    ),
    "somebody else was active, too": (
        {"two_active"},
        _again(
            Delivery,
            lambda one: one.exclusive,
            subscription=lambda one, _: "other",
            consumer=lambda one, _: "other",
        ),
    ),
    "a position goes back": ({"backwards"}, lambda records, chance: _step_back(records, chance)),
    "an answer is taken twice": (
        {"answered_twice", "asked_twice"},
        _again(Response, lambda one: one.outcome == "ok", consumer=lambda one, _: "t"),
    ),
    "an answer is taken after the timeout": (
        {"answered_late"},
        _change(
            Response,
            lambda one: one.outcome == "failed",
            outcome=lambda one, _: "ok",
            begin=_late,
        ),
    ),
    "a publisher's order": ({"order"}, lambda records, chance: _swap(records)),
}


def _cut(records: list[Record], every: bool) -> bool:
    finals = [n for n, one in enumerate(records) if isinstance(one, LastRead) and one.offsets]
    for at in finals if every else finals[-1:]:
        found: Any = records[at]
        records[at] = LastRead(found.node, S, found.offsets[:-1], found.values[:-1])
    last = records[finals[0]] if finals else None
    safe = {one.offset for one in records if isinstance(one, Publish) and one.safe}
    return isinstance(last, LastRead) and (not every or len(last.offsets) in safe)


def _refuse(records: list[Record], chance: random.Random) -> bool:
    there = {value for one in records if isinstance(one, LastRead) for value in one.values}
    fits = lambda one: one.outcome == "unknown" and one.value in there  # noqa: E731
    return bool(_change(Publish, fits, outcome=lambda one, _: "failed")(records, chance))


def _redeliver(records: list[Record], chance: random.Random) -> bool:
    at = _one(records, Acked, chance, lambda one: one.confirmed and one.group == "g")
    if at >= 0:
        ack: Any = records[at]
        value = next(
            one.value for one in records if isinstance(one, Delivery) and one.offset == ack.offset
        )
        records.append(got(value, ack.offset, 1e6, "late", group="g"))
    return at >= 0


def _step_back(records: list[Record], chance: random.Random) -> bool:
    at = _one(records, Acked, chance, lambda one: one.confirmed and one.group == "g")
    if at >= 0:
        ack: Any = records[at]
        records.append(Position(1e6, 1e6 + 1, S, "g", ack.offset, ack.offset + 1))
    return at >= 0


def _swap(records: list[Record]) -> bool:
    safe = [n for n, one in enumerate(records) if isinstance(one, Publish) and one.safe]
    if len(safe) < 2:
        return False
    first, last = safe[0], safe[-1]
    one, other = records[first], records[last]
    assert isinstance(one, Publish)
    assert isinstance(other, Publish)
    records[first] = replace(one, begin=other.begin + 10, end=other.end + 10)
    return True


@pytest.mark.parametrize("name", CHANGES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_system_that_is_not_right_is_accused(name: str, seed: int) -> None:
    kinds, change = CHANGES[name]
    records = right(seed, 60)
    if change(records, random.Random(seed)):
        findings = check(records)
        assert kinds & set(findings.counts), (name, findings.found)


def test_changes_are_possible_at_all() -> None:
    for name, (_, change) in CHANGES.items():
        assert any(change(right(seed, 60), random.Random(seed)) for seed in range(5)), name
