"""Kinds of anomalies, their meanings, and the list of those that a check finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal[
    "lost", "lost_master", "duplicate_id", "duplicate_value", "two_values", "failed_read", "phantom", "order",
    "gap", "diverged", "skipped", "inverted", "never_delivered", "stuck", "unfinished", "two_active", "backwards",
    "redelivered", "answered_twice", "answered_late", "wrong_answer", "asked_twice",
    "stranded", "restart_error", "disk_error", "stalled", "minority_silent", "minority_wrote",
    "staged_seen", "torn", "committed_twice", "lost_commit", "fenced_commit", "false_loss",
]  # fmt: skip
MEANINGS: Final[dict[Kind, str]] = {
    "lost": "a message that was acknowledged by a quorum is not there at the end",
    "lost_master": "a message that only its master acknowledged is lost; `acks=master` allows that: it is only counted",
    "duplicate_id": "one ID at two offsets",
    "duplicate_value": "one message at two offsets, though it was published once",
    "two_values": "two messages at one offset, whoever saw them",
    "failed_read": "a message is read of which the publisher was told that it is not stored",
    "phantom": "a message is read that nobody has published",
    "order": "what a publisher published after an answer lies before what was answered",
    "gap": "offsets of a log do not follow one another",
    "diverged": "two nodes do not have the same in the end",
    "skipped": "a consumer that gets everything in order missed an offset",
    "inverted": "a consumer that gets everything in order got a lower offset after a higher one",
    "never_delivered": "a group never got a message, and says it is done",
    "stuck": "a group gets nothing in the end, though there is something",
    "unfinished": "a group was still being served when its time was up",
    "two_active": "two members of an exclusive group were at work at the same time",
    "backwards": "a group stands before an offset of which the ack was confirmed",
    "redelivered": "a message came again after its ack was confirmed",
    "answered_twice": "two answers to one question were both accepted",
    "answered_late": "an answer was accepted after who asked was told how it ended",
    "wrong_answer": "somebody got an answer that nobody gave to their question",
    "asked_twice": "a group got one question twice",
    "stranded": "a client of a frozen node did not go on at another one before the thaw",
    "restart_error": "a publish failed while nodes were restarted in order, and nothing else was wrong",
    "disk_error": "a publisher heard of a disk that refuses writes, though other nodes could take over",
    "stalled": "a stream took no publish while its master could not write, though other nodes could take over",
    "minority_silent": "a node that was cut off did not answer a reader from its copy",
    "minority_wrote": "a node that was cut off did not refuse a publish at once with NO_MASTER",
    "staged_seen": "a message was seen before anybody had asked to commit it",
    "torn": "a commit is not there wholly, in one piece and in order",
    "committed_twice": "a message of a producer is at two offsets",
    "lost_commit": "a commit was answered, and is not there at the end, though nobody purged it",
    "fenced_commit": "something was committed for an epoch that was over",
    "false_loss": "a producer was told that its output is lost, though it was staged and nobody had dropped it",
}
ALLOWED: Final[frozenset[Kind]] = frozenset({"lost_master"})
"""Kinds that are counted, but do not fail a run."""
MAX_ANOMALIES_PER_KIND: Final = 100
"""How many anomalies of a kind are kept with their evidence; the rest is only counted."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One violation: its kind, a sentence, and the records that show it."""

    kind: Kind
    text: str
    evidence: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Findings:
    """The anomalies that a check has found."""

    def __init__(self) -> None:
        self.found: list[Anomaly] = []
        self.counts: Counter[Kind] = Counter()

    def add(self, kind: Kind, text: str, *evidence: Any) -> None:
        """Add an anomaly with the records that show it."""
        self.counts[kind] += 1
        if self.counts[kind] <= MAX_ANOMALIES_PER_KIND:
            self.found.append(Anomaly(kind, text, evidence))
