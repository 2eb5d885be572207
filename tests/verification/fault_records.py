"""Records of histories for the tests of the fault checker, and a system that does everything right."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from verification.faults.history import (
    Acked,
    Begun,
    Blown,
    Committed,
    CutOff,
    Delivery,
    Drain,
    LastRead,
    Meta,
    Position,
    Publish,
    Purged,
    Record,
    Request,
    Response,
    Staged,
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
