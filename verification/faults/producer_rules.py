"""Check producers: staged messages are unseen, a committed unit is there once, completely and in order.

Rules:

1. A message is seen only if a commit of its sequence was requested before (`staged_seen`).
2. The messages of a sequence lie one behind the other, in the order in which they were staged; so do sequences that
   were committed together, if none of them was committed before. No node has only a part of them at the end, and no
   reader is told of an end of the stream within them (`torn`).
3. No message is ever at two offsets (`committed_twice`).
4. A commit that was confirmed is there at the end, unless it was purged (`lost_commit`).
5. When a later epoch has begun, no commit that an earlier one requests after that takes effect, and no sequence that it
   did not keep is ever seen, unless its commit was requested before (`fenced_commit`).
6. `LOST_OUTPUT` is answered only if a later epoch began without the sequence, or it was not staged completely
   (`false_loss`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from verification.faults.anomalies import Findings
from verification.faults.history import Begun, Committed, Delivery, End, Purged, Record, Staged
from verification.faults.log_rules import StreamFacts

Key: TypeAlias = tuple[str, str]
"""Stream and producer."""


@dataclass(slots=True)
class ProducerFacts:
    """The records of one producer."""

    stream: str
    name: str
    begun: list[Begun] = field(default_factory=list)
    staged: dict[int, Staged] = field(default_factory=dict)
    """By sequence."""
    commits: list[Committed] = field(default_factory=list)

    def commits_of(self, sequence: int) -> list[Committed]:
        """Return the commits that name a sequence."""
        return [commit for commit in self.commits if sequence in commit.sequences]


def check_producers(
    records: Sequence[Record], streams: dict[str, StreamFacts], findings: Findings
) -> None:
    """Add to `findings` every anomaly of producers."""
    producers = _gather(records)
    purges: dict[str, list[Purged]] = defaultdict(list)
    first_seen: dict[Key, float] = {}  # by stream and value
    ends: dict[str, list[End]] = defaultdict(list)
    for record in records:
        match record:
            case Purged():
                purges[record.stream].append(record)
            case Delivery():
                key = (record.stream, record.value)
                first_seen[key] = min(record.at, first_seen.get(key, record.at))
            case End():
                ends[record.stream].append(record)
    for producer in producers.values():
        facts = streams.get(producer.stream)
        if facts is None:
            continue
        for sequence, staged in producer.staged.items():
            commits = producer.commits_of(sequence)
            _check_unseen(producer, staged, commits, facts, first_seen, findings)
            _check_whole(staged, facts, ends[producer.stream], findings)
            _check_kept(staged, commits, facts, purges[producer.stream], findings)
        _check_together(producer, facts, findings)
        _check_fences(producer, facts, findings)
        _check_losses(producer, findings)


def _gather(records: Sequence[Record]) -> dict[Key, ProducerFacts]:
    producers: dict[Key, ProducerFacts] = {}
    for record in records:
        if not isinstance(record, Begun | Staged | Committed):
            continue
        key = (record.stream, record.producer)
        facts = producers.setdefault(key, ProducerFacts(*key))
        match record:
            case Begun():
                facts.begun.append(record)
            case Staged():
                facts.staged[record.sequence] = record
            case Committed():
                facts.commits.append(record)
    return producers


def _offsets(staged: Staged, facts: StreamFacts) -> list[int | None]:
    places = (facts.places.get(value) for value in staged.values)
    return [None if place is None else place[0] for place in places]


def _check_unseen(
    producer: ProducerFacts,
    staged: Staged,
    commits: Sequence[Committed],
    facts: StreamFacts,
    first_seen: dict[Key, float],
    findings: Findings,
) -> None:
    seen = [value for value in staged.values if value in facts.places]
    if not seen:
        return
    where = (
        f"{seen[0]!r} of sequence {staged.sequence} of {producer.name} is seen in {facts.stream}"
    )
    if not commits:
        findings.add("staged_seen", f"{where}, and was never committed", staged)
        return
    earliest = min(commit.begin for commit in commits)
    times = [first_seen[facts.stream, v] for v in seen if (facts.stream, v) in first_seen]
    if times and min(times) < earliest:
        findings.add("staged_seen", f"{where} before a commit was asked for", staged, *commits[:2])


def _check_whole(
    staged: Staged, facts: StreamFacts, ends: Iterable[End], findings: Findings
) -> None:
    offsets = _offsets(staged, facts)
    sightings = [(n, offset) for n, offset in enumerate(offsets) if offset is not None]
    if not sightings:
        return
    base = sightings[0][1] - sightings[0][0]
    who = f"sequence {staged.sequence} of {staged.producer} in {facts.stream}"
    for n, offset in sightings:
        if offset != base + n:
            text = f"message {n} of {who} is at {offset}, and not at {base + n}"
            findings.add("torn", text, staged)
            return
    after = base + len(staged.values)
    for final in facts.finals:
        if not final.offsets:
            continue
        there = sum(
            final.offsets[0] <= offset <= final.offsets[-1] for offset in range(base, after)
        )
        begun = max(base, final.offsets[0])
        if 0 < there < after - begun:
            findings.add("torn", f"{final.node} has {there} of {len(offsets)} of {who}", staged)
    for end in ends:
        if base < end.end < after:
            findings.add(
                "torn", f"{end.node} said that {facts.stream} ends within {who}", end, staged
            )
            return


def _check_kept(
    staged: Staged,
    commits: Sequence[Committed],
    facts: StreamFacts,
    purges: Sequence[Purged],
    findings: Findings,
) -> None:
    done = [commit for commit in commits if commit.outcome == "ok"]
    if not done or not facts.finals:
        return
    missing = [value for value in staged.values if value not in facts.kept]
    if not missing:
        return
    first = min((final.offsets[0] for final in facts.finals if final.offsets), default=0)
    offsets = _offsets(staged, facts)
    place = next((offset - n for n, offset in enumerate(offsets) if offset is not None), None)
    bases = [
        commit.base for commit in done if commit.base >= 0 and commit.sequences == [staged.sequence]
    ]
    if place is None and bases:
        place = bases[0]
    if place is None and purges:
        return  # a purge may have removed it before any reader saw it
    at = 0 if place is None else place
    if not purges or any(
        at + n >= first for n, value in enumerate(staged.values) if value in missing
    ):
        text = (
            f"{len(missing)} of {len(staged.values)} messages of sequence {staged.sequence} of {staged.producer} were "
            f"committed, and are not in {facts.stream}"
        )
        findings.add("lost_commit", text, staged, done[0])


def _check_together(producer: ProducerFacts, facts: StreamFacts, findings: Findings) -> None:
    """Check that sequences that were committed together, and only together, lie one behind the other."""
    for commit in producer.commits:
        if commit.outcome != "ok" or len(commit.sequences) < 2:
            continue
        parts = [producer.staged.get(sequence) for sequence in commit.sequences]
        if any(part is None or len(producer.commits_of(part.sequence)) > 1 for part in parts):
            continue
        bases = []
        for part in parts:
            assert part is not None
            offsets = _offsets(part, facts)
            if offsets and offsets[0] is not None:
                bases.append((offsets[0], len(part.values)))
        bases.sort()
        for (first, count), (second, _) in pairwise(bases):
            if first + count != second:
                text = f"what {producer.name} committed at once lies at {first} and {second} of {facts.stream}"
                findings.add("torn", text, commit)


def _check_fences(producer: ProducerFacts, facts: StreamFacts, findings: Findings) -> None:
    begun = [start for start in producer.begun if start.outcome == "ok"]
    for commit in producer.commits:
        later = next((o for o in begun if o.epoch > commit.epoch and o.end < commit.begin), None)
        if later is not None and commit.outcome == "ok" and commit.count > 0:
            text = (
                f"{commit.count} messages of {producer.name} were committed in epoch {commit.epoch}, after epoch "
                f"{later.epoch} had begun"
            )
            findings.add("fenced_commit", text, later, commit)
    for sequence, staged in producer.staged.items():
        if not any(value in facts.places for value in staged.values):
            continue
        for start in begun:
            if start.epoch <= staged.epoch or start.keep is None or sequence in start.keep:
                continue
            commits = producer.commits_of(sequence)
            if commits and all(commit.begin > start.end for commit in commits):
                text = (
                    f"sequence {sequence} of {producer.name} is seen in {facts.stream}, though epoch "
                    f"{start.epoch} began without it before it was committed"
                )
                findings.add("fenced_commit", text, start, staged, commits[0])


def _check_losses(producer: ProducerFacts, findings: Findings) -> None:
    for commit in producer.commits:
        if commit.code != "LOST_OUTPUT":
            continue
        excuses = [
            sequence
            for sequence in commit.sequences
            if (staged := producer.staged.get(sequence)) is None
            or staged.outcome != "ok"
            or any(
                start.epoch > staged.epoch
                and start.keep is not None
                and sequence not in start.keep
                and start.begin < commit.end
                for start in producer.begun
            )
        ]
        if not excuses:
            lost = f"sequences {commit.sequences} are lost"
            text = f"{producer.name} was told that {lost}, and nobody has begun without them"
            findings.add("false_loss", text, commit)
