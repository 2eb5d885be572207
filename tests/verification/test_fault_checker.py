"""The checker of histories: it finds what must not be, and says nothing of what may be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verification.faults.__main__ import main
from verification.faults.anomalies import ALLOWED, MAX_ANOMALIES_PER_KIND, MEANINGS, Kind
from verification.faults.checker import check, is_sound
from verification.faults.history import (
    Acked,
    Begun,
    Blown,
    Committed,
    CutOff,
    Delivery,
    Drain,
    End,
    Fault,
    History,
    HistoryError,
    LastRead,
    Meta,
    Position,
    Publish,
    Purged,
    Record,
    Request,
    Response,
    Staged,
    of_line,
    read,
    to_line,
)

S = "orders"


def put(value: str, offset: int = -1, at: float = 0.0, outcome: Any = "ok", **more: Any) -> Publish:
    told: dict[str, Any] = {"client": "p", "begin": at, "end": at + 0.5, "offset": offset}
    return Publish(stream=S, value=value, outcome=outcome, **told | more)


def got(value: str, offset: int, at: float = 1.0, who: str = "r", **more: Any) -> Delivery:
    told: dict[str, Any] = {"at": at, "stream": S, "subscription": who, "consumer": who} | more
    return Delivery(offset=offset, value=value, **told)


def only(value: str, offset: int, at: float, who: str, epoch: int, number: int = 1) -> Delivery:
    """To a member of an exclusive group."""
    return got(value, offset, at, who, group="g", exclusive=True, epoch=epoch, number=number)


def done(offset: int, at: float, who: str = "a", epoch: int = 0, **more: Any) -> Acked:
    told: dict[str, Any] = {
        "begin": at,
        "end": at + 0.5,
        "stream": S,
        "group": "g",
        "consumer": who,
    }
    return Acked(**told | {"offset": offset, "number": 1, "epoch": epoch, "confirmed": True} | more)


def kept(*values: str, node: str = "n1", first: int = 0) -> LastRead:
    return LastRead(node, S, list(range(first, first + len(values))), list(values))


def asked(outcome: Any, end: float, **more: Any) -> Request:
    return Request("q", "ask", "who?", 0.0, end, outcome, **more)


def answered(who: str, begin: float, outcome: Any = "ok", **more: Any) -> Response:
    told = {"answer": f"{who}!", "group": "g"} | more
    return Response(who, "ask", "r1", "who?", begin, begin + 0.1, outcome, **told)


def shared(*more: Record) -> list[Record]:
    """Two messages, which a member of the group has got."""
    return [
        put("a", 0),
        put("b", 1),
        got("a", 0, 1.0, group="g"),
        got("b", 1, 1.0, group="g"),
        *more,
    ]


def frozen(*records: Record, seconds: float = 12.0, nodes: int = 3) -> list[Record]:
    """Three clients of n1, each of which has worked before n1 freezes at 10 and thaws so many seconds later."""
    end = 10.0 + seconds
    return [
        Meta(1, nodes, 40.0, patience_s=4.0),
        put("a", 0, client="p1"),
        got("a", 0, 1.0, "r1"),
        only("a", 0, 1.0, "x1", epoch=1),
        *records,
        Blown("freeze", ["n1"], 10.0, 10.0, end, end + 1.0, ["p1", "r1", "x1"]),
    ]


def beside(*records: Record) -> list[Record]:
    """A publisher at another node goes on."""
    return [put("b", 1, 12.0, client="p2"), *records]


def went_on(*records: Record) -> list[Record]:
    """The publisher of n1 goes on at another node, with an ID and without."""
    return [put("b", 1, 13.0, client="p1"), put("c", 2, 14.0, client="p1", id="i"), *records]


def new_for_all(at: float = 15.0) -> list[Record]:
    """The reader and the exclusive group go on."""
    return [
        *(got(value, n, at, "r1") for n, value in ((1, "b"), (2, "c"))),
        *(only(value, n, at, "x2", epoch=2) for n, value in ((1, "b"), (2, "c"))),
    ]


def refused(value: str, at: float, **more: Any) -> Publish:
    """A publish that ends in an error."""
    return put(value, at=at, **{"outcome": "unknown", "code": "CONNECTION_LOST"} | more)


def restarted(*records: Record, nodes: int = 3, patience_s: float = 4.0) -> list[Record]:
    """All nodes are restarted in order from 10 to 30."""
    blow = Blown("rolling", ["n1", "n2", "n3"], 10.0, 28.0, 29.0, 30.0)
    return [Meta(1, nodes, 40.0, patience_s=patience_s), *records, blow]


def unwritable(*records: Record, seconds: float = 10.0, nodes: int = 3) -> list[Record]:
    """The stream was written; from 10 on its master cannot write, for so many seconds."""
    blow = Blown("unwritable_master", ["n1"], 10.0, 10.5, 10.5 + seconds, 12.0 + seconds)
    return [Meta(1, nodes, 40.0, patience_s=4.0), put("a", 0), *records, blow]


def cut_off(**more: Any) -> list[Record]:
    """What a node said that was cut off: as it should be, but for this."""
    told: dict[str, Any] = {"end": 3, "read": True, "code": "NO_MASTER", "publish_s": 0.1}
    return [CutOff("n1", S, 20.0, **told | more)]


def begun(epoch: int, at: float, keep: Any = None, **more: Any) -> Begun:
    """A producer begins an epoch."""
    told: dict[str, Any] = {"outcome": "ok", "keep": keep} | more
    return Begun("f", S, "flow", epoch, at, at + 0.5, **told)


def staged(sequence: int, *values: str, epoch: int = 1, at: float = 0.0, **more: Any) -> Staged:
    """Messages that it stages."""
    told: dict[str, Any] = {"outcome": "ok"} | more
    return Staged("f", S, "flow", epoch, sequence, list(values), at, at + 0.5, **told)


def committed(at: float, *sequences: int, epoch: int = 1, **more: Any) -> Committed:
    """A commit of some sequences."""
    told: dict[str, Any] = {"outcome": "ok", "count": 1} | more
    return Committed("f", S, "flow", epoch, list(sequences), at, at + 0.5, **told)


def purged(before: int | None, at: float = 0.0) -> Purged:
    return Purged(S, at, at + 0.5, before)


two = staged(1, "a", "b")

three: list[Record] = [put("a", 0), put("b", 1), put("c", 2)]

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


GOOD: dict[str, list[Record]] = {
    "nothing": [],
    "a commit is seen": [
        two,
        committed(1, 1, base=0),
        got("a", 0, 2),
        got("b", 1, 2),
        kept("a", "b"),
    ],
    "a commit nobody heard of": [two, committed(1, 1, outcome="unknown"), kept("a", "b")],
    "or that never was": [two, committed(1, 1, outcome="unknown"), kept()],
    "a commit is repeated": [two, committed(1, 1), committed(2, 1, count=0), kept("a", "b")],
    "a straggler hears that it is done": [
        two,
        committed(1, 1),
        begun(2, 2, [1]),
        committed(3, 1, count=0),
        kept("a", "b"),
    ],
    "a straggler was quicker": [two, committed(1, 1), begun(2, 1.2, []), kept("a", "b")],
    "a successor drops what an older snapshot does not have": [
        two,
        begun(2, 1.0, []),
        committed(2, 1, outcome="failed", code="FENCED"),
        kept(),
    ],
    "so it is lost for the one after it": [
        two,
        begun(2, 1.0, []),
        begun(3, 2.0, [1]),
        committed(3, 1, epoch=3, outcome="failed", code="LOST_OUTPUT"),
        kept(),
    ],
    "a commit was purged": [
        two,
        put("c", 2),
        committed(1, 1, base=0),
        purged(2),
        kept("c", first=2),
    ],
    "half of a commit was purged": [two, committed(1, 1), purged(1), kept("b", first=1)],
    "nobody saw it before the purge": [
        two,
        put("c", 2),
        committed(1, 1),
        purged(2),
        kept("c", first=2),
    ],
    "one node has trimmed more": [
        *three,
        purged(2),
        kept("a", "b", "c"),
        kept("c", node="n2", first=2),
    ],
    "a reader jumps over what was purged": [*three, purged(2), got("a", 0), got("c", 2)],
    "or the stream keeps only the newest": [*three, purged(None), got("a", 0), got("c", 2)],
    "two sequences of a commit": [
        two,
        staged(2, "c"),
        committed(1, 1, 2),
        kept("a", "b", "c"),
        End(2.0, S, "n1", 3),
    ],
    "writes go on though the master cannot write": unwritable(put("b", 1, 12.0)),
    "one is not sure, which is no word of a disk": unwritable(
        put("b", 1, 12.0), refused("c", 11.0)
    ),
    "a short trouble may stall": unwritable(put("b", 1, 16.0), seconds=5.0),
    "one of two nodes may": unwritable(nodes=2),
    "with another fault beside, it may": [
        *unwritable(refused("c", 11.0, code="NO_SPACE")),
        Blown("kill", ["n2"], 11.0, 11.0, 14.0, 15.0),
    ],
    "a node that is cut off reads, and refuses": cut_off(),
    "one that has nothing shows nothing": cut_off(end=0, read=False),
    "an unknown publish is there": [put("a", outcome="unknown"), kept("a")],
    "or is not": [put("a", outcome="unknown"), kept()],
    "a refused one is not": [put("a", outcome="failed", code="NO_MASTER"), kept()],
    "refused first, then taken": [
        put("a", outcome="failed", code="NO_MASTER"),
        put("a", 0, at=1.0),
        kept("a"),
    ],
    "an ID again is told where the first is": [
        put("a", 0, id="i"),
        put("b", 1, at=1.0),
        put("a", 0, at=2.0, id="i", code="DUPLICATE_ID"),
        kept("a", "b"),
    ],
    "tried twice without an ID, stored twice": [put("a", 0, tries=2), kept("a", "a")],
    "void answers of a master": [put("a", 0, acks="master"), put("b", 0), kept("b")],
    "too old to be kept": [put("a", 0), put("b", 1), kept("b", first=1)],
    "at the same time, in any order": [put("a", 1, at=0.0), put("b", 0, at=0.2), kept("b", "a")],
    "a reader begins anywhere": [*three, got("b", 1), got("c", 2), got("a", 0, who="s")],
    "it waits at a client while another member acks it": shared(
        done(0, 2), got("a", 0, 9.0, "other", group="g", arrived=1.9)
    ),
    "an exclusive member takes what came before another one was at work": [
        *three,
        only("a", 0, 1, "a", 1),
        only("a", 0, 2, "b", 2),
        replace(only("b", 1, 9, "a", 1), arrived=1.0),
    ],
    "redelivered to the next member": [
        *three,
        only("a", 0, 1, "a", 1),
        only("b", 1, 1, "a", 1),
        only("a", 0, 2, "b", 2, 2),
        only("b", 1, 2, "b", 2, 2),
        only("c", 2, 2, "b", 2),
        done(0, 3, "b", 2),
    ],
    "an ack from before a nack": [
        *three,
        only("a", 0, 1, "a", 1),
        only("b", 1, 1, "a", 1),
        only("b", 1, 2, "a", 2, 2),
        done(0, 3, "a", 1),
    ],
    "an ack that did not count": [
        *three,
        only("a", 0, 1, "a", 1),
        only("a", 0, 2, "b", 2),
        done(0, 3, "a", 1, confirmed=False),
    ],
    "acks that were not confirmed are forgotten": shared(
        done(0, 2, confirmed=False), got("a", 0, 3.0, group="g"), Position(4, 4.1, S, "g", 0, 2)
    ),
    "all is done": shared(done(0, 2), done(1, 2), Position(5, 5.1, S, "g", 2, 2)),
    "what was asked before the ack was confirmed": shared(
        done(0, 2), Position(2.1, 3.0, S, "g", 0, 2)
    ),
    "a group that began later": shared(kept("a", "b"), Drain(S, "h", 5, 9, 2, 2, start=2)),
    "nobody answers": [asked("failed", 1.0, code="RS_TIMEOUT"), answered("a", 1.5, "failed")],
    "two groups are asked": [
        asked("ok", 1.0, answer="a!"),
        answered("a", 0.5),
        answered("b", 0.6, "failed", group="h"),
    ],
    "clients of a frozen node go on": frozen(*went_on(*new_for_all())),
    "an error on the way": frozen(refused("z", 10.5, client="p1"), *went_on(*new_for_all())),
    "a group hands over, with older messages": frozen(
        *went_on(*new_for_all()[:2]), only("a", 0, 15.0, "x2", epoch=2)
    ),
    "a short freeze": frozen(seconds=6.0),
    "the only node": frozen(nodes=1),
    "a freeze beside a kill": [*frozen(), Blown("kill", ["n2"], 12.0, 12.0, 13.0, 14.0)],
    "clients of other nodes": [
        *frozen()[:-1],
        Blown("freeze", ["n1"], 10.0, 10.0, 22.0, 23.0, ["somebody"]),
    ],
    "nothing new for consumers": frozen(put("b", 1, 20.0, client="p1")),
    "a publisher waits for all replicas until the thaw": frozen(
        put("b", 1, 9.9, client="p1", end=12.3),
        put("c", 2, 12.4, client="p1", acks="all", end=22.2),
        got("b", 1, 13.0, "r1"),
        only("b", 1, 13.0, "x2", epoch=2),
    ),
    "a restart without an error": restarted(put("a", 0, 11.0), put("b", 1, 12.0, id="i")),
    "an error before and after a restart": restarted(refused("a", 5.0), refused("b", 31.0)),
    "a restart beside another fault": restarted(
        refused("a", 12.0), Blown("clients_cut", ["n1"], 9.0, 9.0, 11.0, 11.0)
    ),
    "a restart right after another fault": restarted(
        refused("a", 12.0), Blown("clients_cut", ["n1"], 5.0, 5.0, 8.0, 8.0)
    ),
    "the restart of the only node": restarted(refused("a", 12.0), nodes=1),
    "acks of all nodes": restarted(refused("a", 12.0, acks="all", code="TIMEOUT")),
    "an impatient client at its deadline": restarted(refused("a", 12.0, end=16.1)),
    "a publish that the end of the run cuts short": restarted(refused("a", 12.0, code="")),
}


@pytest.mark.parametrize("records", GOOD.values(), ids=GOOD.keys())
def test_it_says_nothing_of(records: list[Record]) -> None:
    findings = check(records)
    assert findings.found == [] or set(findings.counts) == {"lost_master"}


def test_a_delivery_of_an_older_history_came_when_it_was_taken() -> None:
    line = (
        '{"kind": "delivery", "at": 3.0, "stream": "orders", "subscription": "r", "consumer": "r", "offset": 0, '
        '"value": "a", "group": "g", "exclusive": false, "number": 1, "epoch": 0}'
    )
    taken = of_line(line)
    assert isinstance(taken, Delivery)
    assert taken.came == 3.0
    assert "redelivered" in check(shared(done(0, 2), taken)).counts


def test_what_is_under_way_may_come_late() -> None:
    records = [*three, only("a", 0, 1, "a", 1), only("a", 0, 2, "b", 2), only("b", 1, 3, "a", 1)]
    assert is_sound(check([Meta(1, 3, 10.0, transit=2.0), *records]))
    assert not is_sound(check([Meta(1, 3, 10.0, transit=0.5), *records]))


def test_many_of_a_kind_are_counted_and_some_are_shown() -> None:
    findings = check([*(put(f"v{n}", n) for n in range(3 * MAX_ANOMALIES_PER_KIND)), kept()])
    assert findings.counts["lost"] == 3 * MAX_ANOMALIES_PER_KIND
    assert len(findings.found) == MAX_ANOMALIES_PER_KIND


# ---------------------------------------------------------------- a system that is right


class Right:
    """A log, a shared group, an exclusive one, readers and questions, as they should be, by chance."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.log: list[str] = []
        self.records: list[Record] = []
        self.values = 0
        self.ids: dict[str, int] = {}
        self.shared: dict[int, int] = {}  # deliveries so far, of what is not acked
        self.acked: set[int] = set()
        self.taken = 0
        self.epoch, self.active, self.position, self.next = 1, "x1", 0, 0
        self.reading = {"r1": 0, "r2": 0}

    def tick(self) -> float:
        self.now += self.chance.random()
        return self.now

    def run(self, steps: int) -> list[Record]:
        for _ in range(steps):
            self.chance.choice(
                [self.publish, self.publish, self.share, self.exclude, self.read, self.ask]
            )()
        while len(self.acked) < len(self.log):
            self.share()
        while self.position < len(self.log):
            self.exclude()
        for group in ("g", "x"):
            end = len(self.log)
            self.records.append(Drain(S, group, self.tick(), self.tick(), end, end))
        self.records += [kept(*self.log, node=f"n{n}") for n in (1, 2, 3)]
        return self.records

    def publish(self) -> None:
        self.values += 1
        value, begin = f"v{self.values}", self.tick()
        outcome = self.chance.choice(["ok", "ok", "ok", "unknown", "failed"])
        id_ = f"i{self.values}" if self.chance.random() < 0.5 else None
        offset = -1
        if outcome == "ok" or (outcome == "unknown" and self.chance.random() < 0.5):
            offset = len(self.log)
            self.log.append(value)
        told = put(value, offset if outcome == "ok" else -1, outcome=outcome, id=id_)
        self.records.append(replace(told, begin=begin, end=self.tick()))

    def share(self) -> None:
        left = [n for n in range(len(self.log)) if n not in self.acked]
        if not left:
            return
        offset = self.chance.choice(left)
        number = self.shared[offset] = self.shared.get(offset, 0) + 1
        who = self.chance.choice(["a", "b"])
        told = got(self.log[offset], offset, self.tick(), who, group="g", number=number)
        self.records.append(told)
        if self.chance.random() < 0.7:
            counts = self.chance.random() < 0.8
            ack = done(offset, 0.0, who, number=number, confirmed=counts)
            self.records.append(replace(ack, begin=self.tick(), end=self.tick()))
            if counts:
                self.acked.add(offset)
        floor = min((n for n in range(len(self.log)) if n not in self.acked), default=len(self.log))
        self.records.append(Position(self.tick(), self.tick(), S, "g", floor, len(self.log)))

    def exclude(self) -> None:
        if self.chance.random() < 0.2:  # a hand-over
            self.epoch += 1
            self.active, self.next = self.chance.choice(["x1", "x2"]), self.position
        elif self.next < len(self.log):
            offset, epoch = self.next, self.epoch
            self.next += 1
            told = only(self.log[offset], offset, self.tick(), f"{self.active}-{epoch}", epoch)
            self.records.append(replace(told, group="x", consumer=self.active))
            if offset == self.position and self.chance.random() < 0.7:
                ack = done(offset, 0.0, self.active, epoch, exclusive=True)
                self.records.append(replace(ack, group="x", begin=self.tick(), end=self.tick()))
                self.position += 1
        else:
            self.next = self.position
            self.epoch += 1

    def read(self) -> None:
        who = self.chance.choice(["r1", "r2"])
        if self.reading[who] < len(self.log):
            offset = self.reading[who]
            self.reading[who] += 1
            self.records.append(got(self.log[offset], offset, self.tick(), who))

    def ask(self) -> None:
        self.values += 1
        value, begin = f"q{self.values}", self.tick()
        first, second, third = self.tick(), self.tick(), self.tick()
        answers = self.chance.random() < 0.7
        told = Response("s", "ask", value, value, first, second, "ok", f"{value}!", "g")
        if not answers:
            told = replace(told, outcome="failed", code="RS_GONE", begin=third, end=self.tick())
        code = "" if answers else "RS_TIMEOUT"
        outcome: Any = "ok" if answers else "failed"
        answer = f"{value}!" if answers else ""
        self.records += [told, Request("q", "ask", value, begin, third, outcome, answer, code)]


def right(seed: int, steps: int = 120) -> list[Record]:
    return Right(random.Random(seed)).run(steps)


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


# ---------------------------------------------------------------- on disk


def write(file: Path, records: Sequence[Record]) -> None:
    history = History(file)
    history.add_all(records)
    history.close()


def test_a_history_on_disk_is_the_same_and_a_torn_end_is_passed_over(tmp_path: Path) -> None:
    records: list[Record] = [Meta(7, 3, 10.0), Fault(1.0, "kill", "n1"), *right(7)]
    assert [of_line(to_line(one)) for one in records] == records
    write(tmp_path / "h", records)
    assert read(tmp_path / "h") == records
    data = (tmp_path / "h").read_bytes()
    (tmp_path / "h").write_bytes(data[:-10])
    assert read(tmp_path / "h") == records[:-1]
    (tmp_path / "h").write_bytes(b"nonsense\n" + data)
    with pytest.raises(HistoryError, match="line 1"):
        read(tmp_path / "h")


@pytest.mark.parametrize("line", ["{}", "[]", '{"kind": "x"}', '{"kind": "fault", "more": 1}'])
def test_what_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(HistoryError):
        of_line(line)


def test_a_history_can_be_checked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "good", right(3))
    assert main(["check", str(tmp_path / "good")]) == 0
    write(tmp_path / "bad", [put("a", 0), kept()])
    assert main(["check", str(tmp_path / "bad")]) == 1
    told = capsys.readouterr()
    assert "'a' was acknowledged at 0 of orders, and is not there" in told.out
    assert main(["check", str(tmp_path / "none")]) == 2
