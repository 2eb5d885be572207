"""The checker of histories finds what must not be: two bad histories for each of its rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.verification.fault_records import (
    S,
    answered,
    asked,
    begun,
    committed,
    cut_off,
    done,
    frozen,
    got,
    kept,
    new_for_all,
    only,
    purged,
    put,
    refused,
    restarted,
    shared,
    staged,
    three,
    two,
    unwritable,
    went_on,
)
from verification.faults.anomalies import ALLOWED, MEANINGS, Kind
from verification.faults.checker import check, is_sound
from verification.faults.history import Blown, Drain, End, LastRead, Position, Record


def beside(*records: Record) -> list[Record]:
    """A publisher at another node goes on."""
    return [put("b", 1, 12.0, client="p2"), *records]


BAD: dict[str, tuple[Kind, list[Record]]] = {
    "an acked message is nowhere": ("lost", [put("a", 0), kept()]),
    "one of two is": ("lost", [put("a", 0), put("b", 1, acks="all"), kept("a")]),
    "acked by the master only": ("lost_master", [put("a", 0, acks="master"), kept()]),
    "without any ack": ("lost_master", [put("a", acks="none"), kept()]),
    "an ID twice in the log": (
        "duplicate_id",
        [put("a", 0, id="i"), kept("a", "a")],
    ),
    "an ID with two messages": (
        "duplicate_id",
        [put("a", 0, id="i"), put("b", 1, id="i", at=1.0), kept("a", "b")],
    ),
    "an unknown one with an ID was stored twice": (
        "duplicate_id",
        [put("a", outcome="unknown", id="i"), got("a", 3), got("a", 4)],
    ),
    "sent once, stored twice": ("duplicate_value", [put("a", 0), kept("a", "a")]),
    "answered here, read there": ("duplicate_value", [put("a", 0), got("a", 5)]),
    "two nodes have others": (
        "two_values",
        [put("a", 0), put("b", outcome="unknown"), kept("a"), kept("b", node="n2")],
    ),
    "answered one, delivered another": (
        "two_values",
        [put("a", 0), put("b", outcome="unknown"), got("b", 0)],
    ),
    "two answers": ("two_values", [put("a", 0), put("b", 0)]),
    "refused and read": ("failed_read", [put("a", outcome="failed", code="NO_MASTER"), kept("a")]),
    "refused and delivered": (
        "failed_read",
        [put("a", outcome="failed", code="NO_SPACE"), got("a", 0)],
    ),
    "from nowhere": ("phantom", [kept("a")]),
    "garbage to a consumer": ("phantom", [put("a", 0), got("a", 0), got("\x00", 1)]),
    "awaited, and before": ("order", [put("a", 5, at=0.0), put("b", 4, at=1.0)]),
    "three, the last before the first": (
        "order",
        [put("a", 5, at=0.0), put("b", 6, at=1.0), put("c", 4, at=2.0)],
    ),
    "a hole": (
        "gap",
        [put("a", 0), put("c", 2), LastRead("n1", S, [0, 2], ["a", "c"])],
    ),
    "a step back": (
        "gap",
        [put("a", 0), put("b", 1), LastRead("n1", S, [1, 0], ["b", "a"])],
    ),
    "one node has less": (
        "diverged",
        [put("a", 0), put("b", 1), kept("a", "b"), kept("a", node="n2")],
    ),
    "one node has nothing": (
        "diverged",
        [put("a", 0), kept("a"), kept("a", node="n2"), kept(node="n3")],
    ),
    "a reader misses one": ("skipped", [*three, got("a", 0), got("c", 2)]),
    "of two readers one misses one": (
        "skipped",
        [*three, got("a", 0), got("b", 1, who="s"), got("b", 1), got("c", 2), got("a", 0, who="t"),
         got("c", 2, who="t")],
    ),
    "an exclusive group misses one": (
        "skipped",
        [*three, only("a", 0, 1, "a", 1), only("c", 2, 2, "a", 1)],
    ),
    "at the hand-over": (
        "skipped",
        [*three, only("a", 0, 1, "a", 1), only("c", 2, 2, "b", 2)],
    ),
    "a reader goes back": ("inverted", [*three, got("a", 0), got("b", 1), got("a", 0)]),
    "a reader gets one twice": ("inverted", [*three, got("a", 0), got("a", 0)]),
    "an exclusive group goes back": (
        "inverted",
        [*three, only("a", 0, 1, "a", 1), only("b", 1, 1, "a", 1), only("a", 0, 2, "a", 1)],
    ),
    "a first delivery behind a later one": (
        "inverted",
        [*three, only("b", 1, 1, "a", 1), only("a", 0, 2, "b", 2)],
    ),
    "a group that is done without it": (
        "never_delivered",
        [put("a", 0), kept("a"), Drain(S, "g", 5, 9, 1, 1)],
    ),
    "another group had it": (
        "never_delivered",
        [*shared(kept("a", "b")), Drain(S, "h", 5, 9, 2, 2)],
    ),
    "without a last look at the log": (
        "never_delivered",
        [put("a", 0), Drain(S, "g", 5, 9, 1, 1)],
    ),
    "nothing ever came": ("stuck", [put("a", 0), kept("a"), Drain(S, "g", 5, 9, 0, 1)]),
    "nothing comes any more": (
        "stuck",
        [*three, got("a", 0, 1.0, group="g"), Drain(S, "g", 5, 9, 1, 3)],
    ),
    "it goes round": (
        "unfinished",
        [put("a", 0), got("a", 0, 8.5, group="g"), Drain(S, "g", 5, 9, 0, 1)],
    ),
    "it is slow": (
        "unfinished",
        [*three, got("a", 0, 8.5, group="g"), Drain(S, "g", 5, 9, 1, 3)],
    ),
    "two members in one epoch": (
        "two_active",
        [*three, only("a", 0, 1, "a", 1), only("b", 1, 2, "b", 1)],
    ),
    "the old one goes on": (
        "two_active",
        [*three, only("a", 0, 1, "a", 1), only("a", 0, 2, "b", 2), only("b", 1, 3, "a", 1)],
    ),
    "the old one's ack counts": (
        "two_active",
        [*three, only("a", 0, 1, "a", 1), only("a", 0, 2, "b", 2), done(0, 3, "a", 1)],
    ),
    "and it comes back later": (
        "two_active",
        [*three, only("a", 0, 1, "a", 1), only("a", 0, 2, "b", 2), only("a", 0, 2.5, "a", 3),
         done(0, 3, "a", 1)],
    ),
    "a group stands before a confirmed ack": (
        "backwards",
        shared(done(0, 2), Position(3, 3.1, S, "g", 0, 2)),
    ),
    "after it stood behind it": (
        "backwards",
        shared(
            done(0, 2), Position(3, 3.1, S, "g", 1, 2), done(1, 4), Position(5, 5.1, S, "g", 1, 2)
        ),
    ),
    "again after a confirmed ack": ("redelivered", shared(done(0, 2), got("a", 0, 3.0, group="g"))),
    "to another member": (
        "redelivered",
        shared(done(1, 2), got("b", 1, 3.0, "other", group="g", number=2)),
    ),
    "it arrived after a confirmed ack": (
        "redelivered",
        shared(done(0, 2), got("a", 0, 9.0, group="g", arrived=2.6)),
    ),
    "at a member that a former master serves": (
        "redelivered",
        shared(done(1, 2), got("b", 1, 4.0, "other", group="g", number=1, arrived=3.0)),
    ),
    "the old one still gets something, and takes it later": (
        "two_active",
        [*three, only("a", 0, 1, "a", 1), only("a", 0, 2, "b", 2),
         replace(only("b", 1, 9, "a", 1), arrived=3.0)],
    ),
    "two answers were taken": (
        "answered_twice",
        [asked("ok", 1.0, answer="a!"), answered("a", 0.5), answered("b", 0.6, group="h")],
    ),
    "by one who answers twice": (
        "answered_twice",
        [asked("unknown", 1.0), answered("a", 0.5), answered("a", 0.6)],
    ),
    "after the timeout": (
        "answered_late",
        [asked("failed", 1.0, code="RS_TIMEOUT"), answered("a", 1.5)],
    ),
    "after it was answered": (
        "answered_late",
        [asked("ok", 1.0, answer="a!"), answered("a", 0.5, "unknown"), answered("b", 2.0)],
    ),
    "an answer to something else": (
        "wrong_answer",
        [asked("ok", 1.0, answer="b!"), answered("a", 0.5)],
    ),
    "an answer from nowhere": ("wrong_answer", [asked("ok", 1.0, answer="a!")]),
    "two of a group are asked": (
        "asked_twice",
        [asked("ok", 1.0, answer="a!"), answered("a", 0.5), answered("b", 0.6, "failed")],
    ),
    "one is asked twice": (
        "asked_twice",
        [asked("unknown", 1.0), answered("a", 0.5, group=""),
         answered("a", 0.6, "failed", group="")],
    ),
    "a publisher waits for the thaw": (
        "stranded",
        frozen(*beside(), got("b", 1, 13.0, "r1"), only("b", 1, 13.0, "x2", epoch=2),
               put("c", 2, 22.5, client="p1")),
    ),
    "all that it tries fails": (
        "stranded",
        frozen(*(refused(f"v{n}", 11.0 + 2 * n, client="p1") for n in range(5))),
    ),
    "all that it tries fails, beside one that waits for all replicas": (
        "stranded",
        frozen(put("b", 1, 11.0, client="p1", acks="all", end=22.1), refused("c", 12.0, client="p1")),
    ),
    "two that it tries fail, and the next one waits for all replicas": (
        "stranded",
        frozen(refused("b", 10.1, client="p1", end=12.0), refused("c", 12.1, client="p1", end=14.0),
               put("d", 1, 14.1, client="p1", acks="all", end=22.1)),
    ),
    "one publish that ends after the thaw": (
        "stranded",
        frozen(put("b", 1, 11.0, client="p1", end=22.1)),
    ),
    "it publishes with IDs only": (
        "stranded",
        frozen(put("d", 1, 15.0, client="p1", id="d"), got("d", 1, 16.0, "r1"),
               only("d", 1, 16.0, "x1", epoch=2),
               *(refused(f"v{n}", 16.0 + n, client="p1") for n in range(3))),
    ),
    "a reader waits for the thaw": (
        "stranded",
        frozen(*went_on(), *new_for_all()[2:], got("b", 1, 22.5, "r1")),
    ),
    "a reader gets only what was on its way": (
        "stranded",
        frozen(put("z", 1, 9.0, client="p2"), put("b", 2, 12.0, client="p1"),
               got("z", 1, 10.5, "r1"), only("z", 1, 10.5, "x1", epoch=1),
               only("b", 2, 13.0, "x1", epoch=1)),
    ),
    "an exclusive group waits for the thaw": (
        "stranded",
        frozen(*went_on(), *new_for_all()[:2], only("b", 1, 22.5, "x1", epoch=1)),
    ),
    "a publish without an ID during a restart": (
        "restart_error",
        restarted(put("a", 0, 11.0), refused("b", 12.0)),
    ),
    "one with an ID": ("restart_error", restarted(refused("b", 12.0, id="i"))),
    "refused for sure": (
        "restart_error",
        restarted(refused("b", 12.0, outcome="failed", code="NO_MASTER")),
    ),
    "by a patient client, at its deadline": (
        "restart_error",
        restarted(refused("b", 11.0, end=27.0, code="TIMEOUT"), patience_s=16.0),
    ),
    "a publisher is told that the disk of the master is full": (
        "disk_error",
        unwritable(put("b", 1, 12.0), refused("c", 11.0, outcome="failed", code="NO_SPACE")),
    ),
    "or that it has failed": (
        "disk_error",
        unwritable(put("b", 1, 12.0), refused("c", 11.0, id="i", code="LOG_FAILED")),
    ),
    "nothing is taken until the master can write": (
        "stalled",
        unwritable(refused("b", 12.0), put("c", 1, 20.7)),
    ),
    "nothing is tried through": ("stalled", unwritable()),
    "a node that is cut off shows nothing": ("minority_silent", cut_off(read=False)),
    "and does not say what it has": ("minority_silent", cut_off(end=1, read=False, text="no")),
    "a node that is cut off stores a message": ("minority_wrote", cut_off(code="")),
    "or lets a publisher wait": ("minority_wrote", cut_off(publish_s=5.1)),
    "or until its deadline": ("minority_wrote", cut_off(code="DEADLINE", publish_s=0.1)),
    "a staged message is read": ("staged_seen", [two, got("a", 0)]),
    "it is read before its commit": (
        "staged_seen", [two, got("a", 0, 1.0), got("b", 1, 1.0), committed(2.0, 1)],
    ),
    "a transaction that was abandoned is there": ("staged_seen", [two, kept("a", "b")]),
    "half of a commit is at a replica": (
        "torn", [two, committed(1, 1), kept("a", "b"), kept("a", node="n2")],
    ),
    "something comes between": ("torn", [two, put("c", 1), committed(1, 1), kept("a", "c", "b")]),
    "a commit is out of order": ("torn", [two, committed(1, 1), kept("b", "a")]),
    "a node says that the stream ends within a commit": (
        "torn", [two, committed(1, 1), End(2.0, S, "n2", 1), kept("a", "b")],
    ),
    "two sequences of a commit are apart": (
        "torn", [two, staged(2, "c"), put("d", 2), committed(1, 1, 2), kept("a", "b", "d", "c")],
    ),
    "a commit is there twice": ("committed_twice", [two, committed(1, 1), kept("a", "b", "a", "b")]),
    "the second one after a purge": (
        "committed_twice",
        [two, committed(1, 1), got("a", 0, 3), got("b", 1, 3), purged(2), committed(4, 1),
         got("a", 2, 5), got("b", 3, 5)],
    ),
    "it was answered where it is not": (
        "committed_twice", [two, committed(1, 1, base=5), kept("a", "b")],
    ),
    "a commit that was answered is nowhere": ("lost_commit", [two, committed(1, 1), kept()]),
    "also if something before it was purged": (
        "lost_commit", [two, purged(1), put("c", 1), put("d", 2), committed(1, 1, base=3), kept("c", "d", first=1)],
    ),
    "one of two commits is nowhere": (
        "lost_commit", [two, staged(2, "c"), committed(1, 1), committed(2, 2), kept("a", "b")],
    ),
    "a straggler commits": (
        "fenced_commit", [two, begun(2, 1.0, [1]), committed(2.0, 1), kept("a", "b")],
    ),
    "what the successor dropped comes up": (
        "fenced_commit",
        [two, begun(2, 1.0, []), committed(2.0, 1, outcome="unknown"), kept("a", "b")],
    ),
    "the successor commits what it dropped": (
        "fenced_commit", [two, begun(2, 1.0, []), committed(2.0, 1, epoch=2), kept("a", "b")],
    ),
    "what is staged is called lost": (
        "false_loss", [two, committed(1, 1, outcome="failed", count=0, code="LOST_OUTPUT"), kept()],
    ),
    "though the successor has kept it": (
        "false_loss",
        [two, begun(2, 1.0, [1]), committed(2, 1, epoch=2, outcome="failed", code="LOST_OUTPUT")],
    ),
    "a reader jumps over more than was purged": (
        "skipped", [*three, purged(1), got("a", 0), got("c", 2)],
    ),
    "a purge comes too late": ("skipped", [*three, got("a", 0), got("c", 2), purged(2, 5.0)]),
    "a group never got a commit": (
        "never_delivered", [two, committed(1, 1), kept("a", "b"), Drain(S, "g", 5, 9, 2, 2)],
    ),
    "a fault long before is no excuse": (
        "restart_error",
        restarted(Blown("kill", ["n1"], 1.0, 1.0, 2.0, 3.0), refused("b", 12.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "records"), BAD.values(), ids=BAD.keys())
def test_it_finds(kind: Kind, records: list[Record]) -> None:
    findings = check(records)
    assert kind in findings.counts, findings.found
    assert is_sound(findings) == (kind in ALLOWED and len(findings.counts) == 1)
    assert all(one.text and one.evidence for one in findings.found)


def test_every_kind_is_found_at_least_twice() -> None:
    found = [kind for kind, _ in BAD.values()]
    assert {kind: found.count(kind) >= 2 for kind in MEANINGS} == dict.fromkeys(MEANINGS, True)
