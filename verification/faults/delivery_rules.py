"""What must be true of deliveries: to readers without a group, to groups, to exclusive ones, and of questions.

In an exclusive group every delivery has an epoch, and epochs are the order in which things were handed out, whenever
they arrived: sorted by it, nothing is skipped, nothing goes back that was not seen before, and an epoch has one member.
Times tell less, because what was handed out may be under way for a while (a node between was stopped): `transit` is how
long. They are those of the arrival at the client: what has come waits there until its program takes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from verification.faults.anomalies import Findings
from verification.faults.history import Acked, Delivery, Drain, Position, Record, Request, Response
from verification.faults.log_rules import StreamFacts

Key = tuple[str, str]
"""Stream and group."""


class GroupFacts:
    """All that was seen of one group, in order."""

    def __init__(self, key: Key) -> None:
        self.stream, self.group = key
        self.deliveries: list[Delivery] = []
        self.acks: list[Acked] = []
        self.positions: list[Position] = []
        self.drain: Drain | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"group {self.group} of {self.stream}"


def gather_groups(records: Sequence[Record]) -> tuple[dict[Key, GroupFacts], list[Delivery]]:
    """What is known of each group; and the deliveries to readers without."""
    groups: dict[Key, GroupFacts] = {}
    readers: list[Delivery] = []
    for record in records:
        if isinstance(record, Delivery) and not record.group:
            readers.append(record)
            continue
        if not isinstance(record, Delivery | Acked | Position | Drain):
            continue
        key = (record.stream, record.group)
        facts = groups.get(key)
        if facts is None:
            facts = groups[key] = GroupFacts(key)
        match record:
            case Delivery():
                facts.deliveries.append(record)
            case Acked():
                facts.acks.append(record)
            case Position():
                facts.positions.append(record)
            case Drain():
                facts.drain = record
    return groups, readers


# ---------------------------------------------------------------- readers


def check_readers(
    deliveries: Sequence[Delivery], streams: Mapping[str, StreamFacts], findings: Findings
) -> None:
    """Each gets every offset from where it began, once, in order; but for what was purged."""
    last: dict[str, Delivery] = {}
    for one in deliveries:
        before = last.get(one.subscription)
        last[one.subscription] = one
        if before is None or one.offset == before.offset + 1:
            continue
        if one.offset > before.offset and _may_be_purged(one, streams.get(one.stream)):
            continue
        text = f"{one.consumer} got {one.offset} of {one.stream} after {before.offset}"
        findings.add("skipped" if one.offset > before.offset else "inverted", text, before, one)


def _may_be_purged(one: Delivery, facts: StreamFacts | None) -> bool:
    """Return whether all before a message may have been purged when it came."""
    return facts is not None and any(
        (purge.before is None or one.offset <= purge.before) and purge.begin <= one.at
        for purge in facts.purges
    )


# ---------------------------------------------------------------- groups


def check_group(
    facts: GroupFacts, stream: StreamFacts | None, transit: float, findings: Findings
) -> None:
    """All that must be true of one group."""
    confirmed: dict[int, Acked] = {}
    for ack in facts.acks:
        if ack.confirmed and (ack.offset not in confirmed or ack.end < confirmed[ack.offset].end):
            confirmed[ack.offset] = ack
    for one in facts.deliveries:
        known = confirmed.get(one.offset)
        if known is not None and one.came > known.end + transit:
            text = (
                f"{one.offset} came to {one.consumer} of {facts.name} after its ack was confirmed"
            )
            findings.add("redelivered", text, known, one)
    for position in facts.positions:
        known = confirmed.get(position.floor)
        if (
            known is not None
            and known.end < position.begin
            and position.floor < position.stream_end
        ):
            text = f"{facts.name} stands at {position.floor}, of which the ack was confirmed before"
            findings.add("backwards", text, known, position)
    if any(one.exclusive for one in facts.deliveries):
        _exclusive(facts, transit, findings)
    if facts.drain is not None:
        _drained(facts, facts.drain, stream, findings)


def _exclusive(facts: GroupFacts, transit: float, findings: Findings) -> None:
    by_epoch: dict[int, list[Delivery]] = defaultdict(list)
    for one in facts.deliveries:
        by_epoch[one.epoch].append(one)
    seen: set[int] = set()
    highest: Delivery | None = None
    for epoch in sorted(by_epoch):
        before: Delivery | None = None
        for one in by_epoch[epoch]:
            if before is not None and one.subscription != before.subscription:
                text = f"{before.consumer} and {one.consumer} of {facts.name} share epoch {epoch}"
                findings.add("two_active", text, before, one)
            elif before is not None and one.offset <= before.offset:
                text = f"{one.consumer} of {facts.name} got {one.offset} after {before.offset} in epoch {epoch}"
                findings.add("inverted", text, before, one)
            if one.offset not in seen:
                _first_time(facts, one, highest, findings)
                seen.add(one.offset)
            if highest is None or one.offset > highest.offset:
                highest = one
            before = one
    _times(facts, by_epoch, transit, findings)


def _first_time(
    facts: GroupFacts, one: Delivery, highest: Delivery | None, findings: Findings
) -> None:
    if highest is None or one.offset == highest.offset + 1:
        return
    text = f"{facts.name} got {one.offset} for the first time after {highest.offset}"
    if one.offset > highest.offset:
        findings.add("skipped", text, highest, one)
    else:
        findings.add("inverted", text, highest, one)


def _times(
    facts: GroupFacts, by_epoch: dict[int, list[Delivery]], transit: float, findings: Findings
) -> None:
    """Nothing of an epoch after something of a later one; no ack of it counts for who is not active any more."""
    # From the last epoch backwards: the first delivery of any later one, and the first of another consumer than that.
    first: Delivery | None = None
    other: Delivery | None = None
    later: dict[int, tuple[Delivery | None, Delivery | None]] = {}
    for epoch in sorted(by_epoch, reverse=True):
        later[epoch] = (first, other)
        some = by_epoch[epoch]
        if first is not None:
            late = max(some, key=lambda one: one.came)
            if late.came > first.came + transit:
                text = (
                    f"{late.consumer} of {facts.name} got {late.offset} of epoch {epoch} "
                    f"after epoch {first.epoch} had begun"
                )
                findings.add("two_active", text, first, late)
        earliest = min(some, key=lambda one: one.came)
        if first is None or earliest.came < first.came:
            if first is not None and first.consumer != earliest.consumer:
                other = first
            first = earliest
        elif earliest.consumer != first.consumer and (other is None or earliest.came < other.came):
            other = earliest
    for ack in facts.acks:
        if not ack.confirmed:
            continue
        newer = next(
            (
                one
                for one in later.get(ack.epoch, (None, None))
                if one is not None and one.consumer != ack.consumer
            ),
            None,
        )
        if newer is not None and newer.came < ack.begin:
            text = (
                f"an ack of {ack.consumer} of {facts.name} for {ack.offset} of epoch {ack.epoch} counted, "
                f"when {newer.consumer} was at work in epoch {newer.epoch}"
            )
            findings.add("two_active", text, newer, ack)


def _drained(
    facts: GroupFacts, drain: Drain, stream: StreamFacts | None, findings: Findings
) -> None:
    if drain.lag > 0:
        last = max((one.at for one in facts.deliveries), default=-math.inf)
        told = f"{drain.lag} messages of {facts.name} are not done, from {drain.floor} on"
        if last < (drain.begin + drain.end) / 2:
            findings.add("stuck", f"{told}, and nothing comes", drain)
        else:
            findings.add("unfinished", f"{told}, and the time is up", drain)
        return
    if stream is None:
        return
    got = {one.value for one in facts.deliveries}
    for value, operations in stream.publishes.items():
        offset = stream.kept.get(value)
        if offset is None and not stream.finals:
            offset = next((one.offset for one in operations if one.safe), None)
        if offset is not None and value not in got and drain.start <= offset < drain.stream_end:
            text = f"{facts.name} is done, and never got {value!r} at {offset}"
            findings.add("never_delivered", text, *operations[:3], drain)
    for value, staged in stream.staged.items():
        offset = stream.kept.get(value)
        if offset is not None and value not in got and drain.start <= offset < drain.stream_end:
            text = f"{facts.name} is done, and never got {value!r} at {offset}"
            findings.add("never_delivered", text, staged, drain)


# ---------------------------------------------------------------- questions


def check_questions(records: Sequence[Record], findings: Findings) -> None:
    """One question, one answer, in time; and each group gets it once."""
    requests = {one.value: one for one in records if isinstance(one, Request)}
    responses: dict[str, list[Response]] = defaultdict(list)
    for record in records:
        if isinstance(record, Response):
            responses[record.value].append(record)
    for value, some in responses.items():
        _answers(value, some, requests.get(value), findings)
    for value, asked in requests.items():
        given = {one.answer for one in responses.get(value, [])}
        if asked.outcome == "ok" and asked.answer not in given:
            text = f"{asked.client} asked {value!r} and got {asked.answer!r}, which nobody said"
            findings.add("wrong_answer", text, asked, *responses.get(value, [])[:3])


def _answers(
    value: str, some: Sequence[Response], asked: Request | None, findings: Findings
) -> None:
    accepted = [one for one in some if one.outcome == "ok"]
    if len(accepted) > 1:
        who = ", ".join(one.consumer for one in accepted)
        findings.add("answered_twice", f"{value!r} was answered by {who}", *accepted)
    groups: dict[str, Response] = {}
    for one in some:
        known = groups.setdefault(one.group or f"{one.consumer} alone", one)
        if known is not one:
            text = f"{value!r} came to {known.consumer} and to {one.consumer}"
            findings.add("asked_twice", text, known, one)
    if asked is None or asked.outcome == "unknown":
        return
    for one in accepted:
        if one.begin > asked.end:
            told = asked.code or "an answer"
            text = f"{one.consumer} answered {value!r} after {asked.client} was told {told}"
            findings.add("answered_late", text, asked, one)
