"""The new owner's side: gates, lines, and that an event frees all it can and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verification.rescale.rows import Item, Rows

from railgun.engine.protocol.frontier import MAX
from railgun.engine.protocol.placement import Placement
from railgun.engine.protocol.rescale import Distributor
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.chunks import Chunks, Run
from railgun.errors import ProtocolError
from railgun.hashing import Hashes

HOMES = (0, 1)
ME = 2
MEMBERS = (0, 1, 2)
KEYS = range(1, 13)
OLD = Placement.of(HOMES, keys={key: key % 2 for key in KEYS})
NEW = Placement.of(MEMBERS, keys=dict.fromkeys(KEYS, ME))
CHUNKS = {(0, 1): (8, 2), (0, 2): (10, 4), (1, 1): (7, 1), (1, 2): (3,)}
"""Keys by home and chunk; 6 and 12 of home 0 and 5, 9 and 11 of home 1 have no state."""


def hashes(keys: tuple[int, ...]) -> Hashes:
    return np.array(keys, dtype=np.uint64)


@dataclass
class Reference:
    """The rules as they are told: after every event look at all that waits again."""

    fences: bool
    flushed: set[tuple[int, int]] = field(default_factory=set)
    confirmed: dict[tuple[int, int], int] = field(default_factory=dict)
    acquired: set[tuple[int, int]] = field(default_factory=set)
    states: list[tuple[int, int]] = field(default_factory=list)
    forwarded: list[tuple[int | None, Item]] = field(default_factory=list)
    direct: list[tuple[int | None, Item]] = field(default_factory=list)

    def open(self, home: int, chunk: int) -> bool:
        return not self.fences or self.confirmed.get((home, chunk), 0) == len(MEMBERS)

    def ready(self, origin: int | None, key: int) -> bool:
        home = key % 2
        if origin is not None and (home, origin) not in self.flushed:
            return False
        waiting = any(home == at and key in CHUNKS[at, chunk] for at, chunk in self.states)
        return self.open(home, 0) and not waiting

    def go_on(self) -> list[Item]:
        self.states = [at for at in self.states if not self.open(*at)]
        gone: list[Item] = []
        for line in (self.forwarded, self.direct):
            gone += [item for origin, item in line if self.ready(origin, item.key)]
            line[:] = [(o, item) for o, item in line if not self.ready(o, item.key)]
        return gone


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans())
def test_each_event_frees_what_the_rules_say_in_order(data: st.DataObject, fences: bool) -> None:
    worker = Distributor(ME, OLD, MEMBERS, stage="s", downstream=int(fences))
    worker.handle(m.Rescale(1, NEW))
    reference = Reference(fences)
    seqs: dict[tuple[int, int], int] = {}
    confirms = [(h, c) for h, c in [*CHUNKS, (0, 0), (1, 0)] for _ in MEMBERS] if fences else []
    chunks = list(CHUNKS)

    def batch(origin: int, keys: list[int]) -> Rows:
        items = []
        for key in keys:
            seq = seqs[origin, key] = seqs.get((origin, key), 0) + 1
            items.append(Item(key, origin, seq))
        return Rows(items)

    def feed(sender: int, message: m.Message) -> None:
        expected = reference.go_on()
        commands = worker.handle(m.Received(sender, message))
        worker.validate()
        got = [i for c in commands if isinstance(c, m.Process) for i in c.batch.items]  # type: ignore[attr-defined]
        assert sorted(got, key=_line) == sorted(expected, key=_line)
        arrivals = worker.migration_now().arrivals
        waiting = reference.forwarded or reference.direct or reference.states
        assert arrivals.empty == (not waiting)

    def forward(home: int, origin: int, keys: list[int]) -> None:
        rows = batch(origin, keys)
        reference.forwarded += [(None, item) for item in rows.items]
        feed(home, m.Forward(1, rows))

    keys_of = {home: [key for key in KEYS if key % 2 == home] for home in HOMES}
    for _ in range(data.draw(st.integers(5, 40))):
        what = data.draw(st.sampled_from(["acquire", "forward", "new", "flushed", "fenced"]))
        if what == "acquire" and chunks:
            home, chunk = chunks.pop(0)
            reference.acquired.add((home, chunk))
            reference.states.append((home, chunk))
            feed(home, m.Acquire(1, chunk, hashes(CHUNKS[home, chunk]), {}))
        elif what == "forward":
            home = data.draw(st.sampled_from(HOMES))
            origins = [o for o in (0, 1) if (home, o) not in reference.flushed]
            # A key with state is forwarded behind it only.
            able = [k for k in keys_of[home] if not _before_state(k, reference)]
            if origins and able:
                keys = data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=6))
                forward(home, data.draw(st.sampled_from(origins)), keys)
        elif what == "new":
            origin = data.draw(st.sampled_from([0, 1]))
            able = [k for k in KEYS if not _before_state(k, reference)]
            keys = data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=8))
            rows = batch(origin, keys)
            reference.direct += [(origin, item) for item in rows.items]
            feed(origin, m.Data(1, rows))
        elif what == "flushed":
            pairs = [(h, o) for h in HOMES for o in (0, 1) if (h, o) not in reference.flushed]
            if pairs and not chunks:
                home, origin = data.draw(st.sampled_from(pairs))
                reference.flushed.add((home, origin))
                feed(home, m.Flushed(1, origin))
        elif what == "fenced" and confirms:
            home, chunk = confirms.pop(data.draw(st.integers(0, len(confirms) - 1)))
            count = reference.confirmed[home, chunk] = reference.confirmed.get((home, chunk), 0) + 1
            feed(MEMBERS[count - 1], m.Fenced(1, home, chunk))


def _line(item: Item) -> tuple[int, int]:
    """Only records of one sender and key have an order; sorting by these keeps it."""
    return item.origin, item.key


def _before_state(key: int, reference: Reference) -> bool:
    """Whether a key's state is still to come."""
    return any(key in keys and at not in reference.acquired for at, keys in CHUNKS.items())


@settings(max_examples=200, deadline=None)
@given(st.permutations(range(60)), st.data())
def test_the_chunk_of_a_key_is_found_whatever_came_and_went_meanwhile(
    left: list[int], data: st.DataObject
) -> None:
    chunks = Chunks(0)
    waiting: dict[int, list[int]] = {}
    number = 0
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["add", "add", "remove", "ask"]))
        if what == "add" and left:
            number += 1
            size = data.draw(st.integers(1, 9))
            waiting[number], left = left[:size], left[size:]
            chunks.add(number, hashes(tuple(waiting[number])))
        elif what == "remove" and waiting:
            gone = data.draw(st.sampled_from(list(waiting)))
            del waiting[gone]
            chunks.remove(gone)
        elif what == "ask":
            asked = data.draw(st.lists(st.integers(0, 60)))
            of = {key: chunk for chunk, keys in waiting.items() for key in keys}
            assert chunks.of(hashes(tuple(asked))).tolist() == [of.get(key, 0) for key in asked]
        chunks.validate()
        assert len(chunks) == len(waiting)


def test_of_hundreds_of_chunks_a_key_is_sorted_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sorted_keys = 0
    sort = Chunks._sort

    def count(chunks: Chunks, numbers: tuple[int, ...]) -> Run:
        nonlocal sorted_keys
        run = sort(chunks, numbers)
        sorted_keys += len(run.hashes)
        return run

    monkeypatch.setattr(Chunks, "_sort", count)
    every = np.random.default_rng(1).permutation(512 * 20).astype(np.uint64)
    chunks = Chunks(0)
    for number, at in enumerate(range(0, len(every), 20), 1):
        chunks.add(number, every[at : at + 20])
        assert set(chunks.of(every[: at + 40 : 20]).tolist()) >= {1, number}
    assert len(chunks.runs) <= 10
    assert sorted_keys <= 10 * len(every)
    for number in range(1, 513):  # and they go, one by one
        chunks.remove(number)
        assert set(chunks.of(every[::20]).tolist()) == {0, *range(number + 1, 513)}
    assert sorted_keys <= 12 * len(every)
    assert not chunks.runs


def acquire(*chunks: tuple[int, tuple[int, ...]]) -> Distributor:
    worker = Distributor(ME, Placement.of([0]), MEMBERS, stage="s", downstream=1)
    worker.handle(m.Rescale(1, NEW))
    for number, keys in chunks:
        worker.handle(m.Received(0, m.Acquire(1, number, hashes(keys), {})))
    return worker


def test_a_chunk_that_comes_twice_or_has_no_keys_is_refused() -> None:
    for second in ((1, (3,)), (2, ())):
        with pytest.raises(ProtocolError, match="twice, or without keys"):
            acquire((1, (4, 2)), second)


def test_a_key_that_comes_twice_is_refused_when_it_is_looked_for() -> None:
    for second in ((3, 2), (6, 6)):
        worker = acquire((1, (4, 2)), (2, second))
        for sender in MEMBERS:
            worker.handle(m.Received(sender, m.Fenced(1, 0, 0)))
        with pytest.raises(ProtocolError, match="a key came twice from worker 0"):
            worker.handle(m.Received(0, m.Forward(1, Rows([Item(2, 0, 1)]))))


def test_time_goes_on_when_the_line_that_held_it_is_gone() -> None:
    worker = Distributor(ME, OLD, MEMBERS, stage="s")
    worker.handle(m.Rescale(1, NEW))
    for sender, value in ((0, 5), (1, 3)):
        worker.handle(m.Received(sender, m.Frontier(0, value)))
        worker.handle(m.Received(sender, m.Data(1, Rows([Item(2, sender, 1, 9)]))))
    arrivals = worker.migration_now().arrivals
    assert arrivals.lowest == 3
    worker.handle(m.Received(0, m.Flushed(1, 1)))
    assert arrivals.lowest == 5
    worker.handle(m.Received(0, m.Flushed(1, 0)))
    assert arrivals.lowest == MAX


def test_complete_when_all_have_flushed_and_fence_0_is_confirmed_for_every_home() -> None:
    worker = Distributor(ME, OLD, MEMBERS, stage="s", downstream=1)
    worker.handle(m.Rescale(1, NEW))
    arrivals = worker.migration_now().arrivals
    for home in HOMES:
        for origin in MEMBERS:
            assert not arrivals.finished(home)
            worker.handle(m.Received(home, m.Flushed(1, origin)))
        assert arrivals.finished(home)
    for home in HOMES:
        for sender in MEMBERS:
            assert not arrivals.complete
            worker.handle(m.Received(sender, m.Fenced(1, home, 0)))
    assert arrivals.complete
