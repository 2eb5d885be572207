"""The checker of histories says nothing of what may be, and counts what it finds often."""

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
from verification.faults.anomalies import MAX_ANOMALIES_PER_KIND
from verification.faults.checker import check, is_sound
from verification.faults.history import Blown, Delivery, Drain, End, Meta, Position, Record, of_line

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
    "a publisher loses one publish, and waits for all replicas with the next": frozen(
        refused("b", 10.1, client="p1", end=12.3),
        put("c", 2, 12.4, client="p1", acks="all", end=22.2),
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
