"""Check deliveries: to readers without a group, to groups, to exclusive groups, and of requests.

In an exclusive group every delivery has an epoch, and epochs are the order in which messages were handed out, whenever
they arrived: sorted by epoch, no offset is skipped, no offset goes back that was not seen before, and an epoch has one
member. Times tell less, because a delivery may be under way for a while (a node between was stopped): `transit` is the
longest such time. Times are those of the arrival at the client: a message waits there until its program takes it.
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
    """The records of one group, in order."""

    def __init__(self, key: Key) -> None:
        self.stream, self.group = key
        self.deliveries: list[Delivery] = []
        self.acks: list[Acked] = []
        self.positions: list[Position] = []
        self.drain: Drain | None = None

    @property
    def name(self) -> str:
        """Return the name of the group and stream for people."""
        return f"group {self.group} of {self.stream}"


def gather_groups(records: Sequence[Record]) -> tuple[dict[Key, GroupFacts], list[Delivery]]:
    """Return the facts of each group, and the deliveries to readers without a group."""
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
    """Check that each reader gets every offset after its first, once, in order, except purged ones."""
    last: dict[str, Delivery] = {}
    for delivery in deliveries:
        before = last.get(delivery.subscription)
        last[delivery.subscription] = delivery
        if before is None or delivery.offset == before.offset + 1:
            continue
        if delivery.offset > before.offset and _may_be_purged(
            delivery, streams.get(delivery.stream)
        ):
            continue
        text = (
            f"{delivery.consumer} got {delivery.offset} of {delivery.stream} after {before.offset}"
        )
        findings.add(
            "skipped" if delivery.offset > before.offset else "inverted", text, before, delivery
        )


def _may_be_purged(delivery: Delivery, facts: StreamFacts | None) -> bool:
    """Return whether all messages before a delivery may have been purged when it arrived."""
    return facts is not None and any(
        (purge.before is None or delivery.offset <= purge.before) and purge.begin <= delivery.at
        for purge in facts.purges
    )


# ---------------------------------------------------------------- groups


def check_group(
    facts: GroupFacts, stream: StreamFacts | None, transit: float, findings: Findings
) -> None:
    """Check all rules of one group."""
    confirmed: dict[int, Acked] = {}
    for ack in facts.acks:
        if ack.confirmed and (ack.offset not in confirmed or ack.end < confirmed[ack.offset].end):
            confirmed[ack.offset] = ack
    for delivery in facts.deliveries:
        earlier = confirmed.get(delivery.offset)
        if earlier is not None and delivery.came > earlier.end + transit:
            text = f"{delivery.offset} came to {delivery.consumer} of {facts.name} after its ack was confirmed"
            findings.add("redelivered", text, earlier, delivery)
    for position in facts.positions:
        earlier = confirmed.get(position.floor)
        if (
            earlier is not None
            and earlier.end < position.begin
            and position.floor < position.stream_end
        ):
            text = f"{facts.name} stands at {position.floor}, of which the ack was confirmed before"
            findings.add("backwards", text, earlier, position)
    if any(delivery.exclusive for delivery in facts.deliveries):
        _exclusive(facts, transit, findings)
    if facts.drain is not None:
        _drained(facts, facts.drain, stream, findings)


def _exclusive(facts: GroupFacts, transit: float, findings: Findings) -> None:
    by_epoch: dict[int, list[Delivery]] = defaultdict(list)
    for delivery in facts.deliveries:
        by_epoch[delivery.epoch].append(delivery)
    seen: set[int] = set()
    highest: Delivery | None = None
    for epoch in sorted(by_epoch):
        before: Delivery | None = None
        for delivery in by_epoch[epoch]:
            if before is not None and delivery.subscription != before.subscription:
                text = (
                    f"{before.consumer} and {delivery.consumer} of {facts.name} share epoch {epoch}"
                )
                findings.add("two_active", text, before, delivery)
            elif before is not None and delivery.offset <= before.offset:
                got = f"{delivery.offset} after {before.offset} in epoch {epoch}"
                text = f"{delivery.consumer} of {facts.name} got {got}"
                findings.add("inverted", text, before, delivery)
            if delivery.offset not in seen:
                _first_time(facts, delivery, highest, findings)
                seen.add(delivery.offset)
            if highest is None or delivery.offset > highest.offset:
                highest = delivery
            before = delivery
    _times(facts, by_epoch, transit, findings)


def _first_time(
    facts: GroupFacts, delivery: Delivery, highest: Delivery | None, findings: Findings
) -> None:
    if highest is None or delivery.offset == highest.offset + 1:
        return
    text = f"{facts.name} got {delivery.offset} for the first time after {highest.offset}"
    if delivery.offset > highest.offset:
        findings.add("skipped", text, highest, delivery)
    else:
        findings.add("inverted", text, highest, delivery)


def _times(
    facts: GroupFacts, by_epoch: dict[int, list[Delivery]], transit: float, findings: Findings
) -> None:
    """Check that nothing of an epoch comes after a later epoch, and that no ack of an inactive member counts."""
    # From the last epoch backwards: the first delivery of any later epoch, and the first of another consumer than that.
    first: Delivery | None = None
    first_of_another: Delivery | None = None
    later: dict[int, tuple[Delivery | None, Delivery | None]] = {}
    for epoch in sorted(by_epoch, reverse=True):
        later[epoch] = (first, first_of_another)
        deliveries = by_epoch[epoch]
        if first is not None:
            late = max(deliveries, key=lambda delivery: delivery.came)
            if late.came > first.came + transit:
                text = (
                    f"{late.consumer} of {facts.name} got {late.offset} of epoch {epoch} "
                    f"after epoch {first.epoch} had begun"
                )
                findings.add("two_active", text, first, late)
        earliest = min(deliveries, key=lambda delivery: delivery.came)
        if first is None or earliest.came < first.came:
            if first is not None and first.consumer != earliest.consumer:
                first_of_another = first
            first = earliest
        elif earliest.consumer != first.consumer and (
            first_of_another is None or earliest.came < first_of_another.came
        ):
            first_of_another = earliest
    for ack in facts.acks:
        if not ack.confirmed:
            continue
        newer = next(
            (
                delivery
                for delivery in later.get(ack.epoch, (None, None))
                if delivery is not None and delivery.consumer != ack.consumer
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
        last = max((delivery.at for delivery in facts.deliveries), default=-math.inf)
        text = f"{drain.lag} messages of {facts.name} are not done, from {drain.floor} on"
        if last < (drain.begin + drain.end) / 2:
            findings.add("stuck", f"{text}, and nothing comes", drain)
        else:
            findings.add("unfinished", f"{text}, and the time is up", drain)
        return
    if stream is None:
        return
    got = {delivery.value for delivery in facts.deliveries}
    for value, operations in stream.publishes.items():
        offset = stream.kept.get(value)
        if offset is None and not stream.finals:
            offset = next((operation.offset for operation in operations if operation.safe), None)
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
    """Check that each request has one answer, in time, and reaches each group once."""
    requests = {request.value: request for request in records if isinstance(request, Request)}
    responses: dict[str, list[Response]] = defaultdict(list)
    for record in records:
        if isinstance(record, Response):
            responses[record.value].append(record)
    for value, answers in responses.items():
        _answers(value, answers, requests.get(value), findings)
    for value, request in requests.items():
        answers_given = {response.answer for response in responses.get(value, [])}
        if request.outcome == "ok" and request.answer not in answers_given:
            text = f"{request.client} asked {value!r} and got {request.answer!r}, which nobody said"
            findings.add("wrong_answer", text, request, *responses.get(value, [])[:3])


def _answers(
    value: str, responses: Sequence[Response], request: Request | None, findings: Findings
) -> None:
    accepted = [response for response in responses if response.outcome == "ok"]
    if len(accepted) > 1:
        who = ", ".join(response.consumer for response in accepted)
        findings.add("answered_twice", f"{value!r} was answered by {who}", *accepted)
    groups: dict[str, Response] = {}
    for response in responses:
        first = groups.setdefault(response.group or f"{response.consumer} alone", response)
        if first is not response:
            text = f"{value!r} came to {first.consumer} and to {response.consumer}"
            findings.add("asked_twice", text, first, response)
    if request is None or request.outcome == "unknown":
        return
    for response in accepted:
        if response.begin > request.end:
            outcome = request.code or "an answer"
            text = (
                f"{response.consumer} answered {value!r} after {request.client} was told {outcome}"
            )
            findings.add("answered_late", text, request, response)
