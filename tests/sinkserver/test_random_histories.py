"""Random histories of a flow and its sink: workers join and leave, snapshots fail, publishing is slow, all crash.

The flow here keeps the duties of `flows/sink.py` and numbers snapshots as `engine/worker/saver.py` does. Whatever
happens, what comes out is what went in, once, and snapshot after snapshot.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from tests.sinkserver.sinks import Shelf

from railgun.ingest.errors import SinkError
from railgun.sinkserver.participant import Participant
from railgun.transport.packed_records import pack

STEPS = 120
Token = tuple[str, int, int]  # transaction, generation, snapshot


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda file: None)


@dataclass
class Worker:
    number: int
    generation: int
    last: int = 0  # the last snapshot that began here: none, if it has just joined
    txn: str = ""
    count: int = 0
    end: int = 0
    prepared: list[Token] = field(default_factory=list)  # and not known to be committed
    publishing: list[Token] = field(default_factory=list)


class Sink:
    """A sink that is closed and opened again, for one or more flows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shelf = Shelf()
        self.part = Participant(directory, self.shelf)
        self.part.open()

    def reopen(self) -> None:
        self.part.close()
        self.part = Participant(self.directory, self.shelf)
        self.part.open()


class History:
    def __init__(self, sink: Sink, seed: int, store: str = "") -> None:
        self.draw = Random(seed)
        self.sink = sink
        self.store = store
        self.generation = self.numbers = 0
        self.snapshot = 1  # the first one is 2: see rule 6 of a participant, in brackets
        self.written = self.saved = 0  # items, by now and by the last manifest
        self.manifest: list[Token] = []
        self.intervals: list[int] = []  # where manifests cut the items
        self.left: list[Token] = []
        self.workers: list[Worker] = []
        self.zombies: list[Worker] = []
        self.too_small = 0  # hand-overs with a number that snapshots have left behind
        self.begin()

    # ------------------------------------------------------------ what happens

    def begin(self) -> None:
        """A generation begins from the last manifest."""
        self.generation += 1
        self.zombies += self.workers
        self.written, self.left = self.saved, []
        for txn, _, _ in sorted(self.manifest, key=lambda token: token[1:]):
            self.part.commit(txn)
        for left in self.part.uncommitted("demo", "out", self.generation, self.store):
            self.part.abort(left.id)
        self.workers = []
        for _ in range(self.draw.randint(1, 3)):
            self.join()

    def join(self) -> None:
        self.numbers += 1
        self.workers.append(Worker(self.numbers, self.generation))

    def write(self, worker: Worker) -> None:
        if not worker.txn:
            worker.txn = f"{self.draw.getrandbits(128):032x}"
            worker.count = worker.end = 0
            names = "demo", "out", worker.generation, worker.number
            self.part.begin(worker.txn, *names, store=self.store)
        data = pack([b"%s %d" % (self.store.encode(), self.written)])
        worker.end = self.part.data(worker.txn, worker.end, data)
        worker.count += 1
        self.written += 1

    def prepare(self, worker: Worker, snapshot: int) -> None:
        if worker.txn:
            self.part.prepare(worker.txn, snapshot, worker.end, worker.count)
            worker.prepared.append((worker.txn, worker.generation, snapshot))
            worker.txn = ""

    def take(self, fails: bool) -> None:
        self.snapshot += 1
        for worker in self.draw.sample(self.workers, len(self.workers)):
            worker.last = self.snapshot
            self.prepare(worker, self.snapshot)
        if fails:
            return
        self.manifest = [token for worker in self.workers for token in worker.prepared] + self.left
        self.saved = self.written
        self.intervals.append(self.saved)
        left, self.left = self.left, []
        self.draw.choice(self.workers).prepared += left
        for worker in self.workers:
            worker.publishing = list(worker.prepared)

    def publish(self, worker: Worker) -> None:
        for token in worker.publishing[: self.draw.randint(1, 3)]:
            self.part.commit(token[0])
            worker.publishing.remove(token)
            worker.prepared.remove(token)

    def leave(self, worker: Worker) -> None:
        self.too_small += bool(worker.txn) and worker.last < self.snapshot
        self.prepare(worker, worker.last + 1)
        self.left += worker.prepared
        self.workers.remove(worker)

    def disturb(self, zombie: Worker) -> None:
        """A process of an older generation goes on as if nothing had happened."""
        with contextlib.suppress(SinkError):
            for token in zombie.publishing:
                self.part.commit(token[0])
        with contextlib.suppress(SinkError):
            if zombie.txn:
                self.part.prepare(zombie.txn, self.snapshot, zombie.end, zombie.count)

    @property
    def part(self) -> Participant:
        return self.sink.part

    # ------------------------------------------------------------ in any order

    def step(self) -> None:
        worker = self.draw.choice(self.workers)
        match self.draw.choices(
            ("write", "take", "publish", "join", "leave", "crash", "reopen", "disturb"),
            (8, 3, 4, 2, 2, 0.4, 1, 1),
        )[0]:
            case "write":
                self.write(worker)
            case "take":
                self.take(self.draw.random() < 0.3)
            case "publish":
                self.publish(worker)
            case "join":
                self.join()
            case "leave" if len(self.workers) > 1:
                self.leave(worker)
            case "crash":
                self.begin()
            case "reopen":
                self.sink.reopen()
            case "disturb" if self.zombies:
                self.disturb(self.draw.choice(self.zombies))

    def end(self) -> None:
        self.take(fails=False)
        for worker in self.workers:
            while worker.publishing:
                self.publish(worker)

    def check(self) -> None:
        of_each = (item.decode().split(" ") for item in self.sink.shelf.items)
        found = [int(number) for store, number in of_each if store == self.store]
        assert sorted(found) == list(range(self.saved)), "each item, once"
        ends = sorted(set(self.intervals))
        intervals = [next(n for n, end in enumerate(ends) if item < end) for item in found]
        assert intervals == sorted(intervals), "snapshot after snapshot"


def test_output_is_what_went_in_whatever_happens(tmp_path: Path) -> None:
    items = too_small = 0
    for seed in [1726, *range(150)]:
        sink = Sink(tmp_path / str(seed))
        history = History(sink, seed)
        try:
            for _ in range(STEPS):
                history.step()
            history.end()
            history.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        finally:
            sink.part.close()
        items += history.saved
        too_small += history.too_small
    assert items > 2000
    assert too_small > 50, "the case that would be committed too early comes up"


def test_two_jobs_of_one_flow_share_a_sink_whatever_happens_to_each(tmp_path: Path) -> None:
    for seed in range(80):
        sink = Sink(tmp_path / str(seed))
        draw = Random(seed)
        histories = [History(sink, draw.randrange(1 << 30), store) for store in ("5f3a", "77aa")]
        try:
            for _ in range(2 * STEPS):
                draw.choice(histories).step()
            for history in histories:
                history.end()
            for history in histories:
                history.check()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        finally:
            sink.part.close()
