"""Two distributors, two links and a key that moves: the protocol with nothing around it.

Run it: ./run python examples/rescale_by_hand.py
"""

from __future__ import annotations

from collections import deque

from verification.rescale.rows import Item, Rows

from railgun.engine.protocol.placement import Placement
from railgun.engine.protocol.rescale import Distributor
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.order import Order
from railgun.hashing import key_hash

ADA = key_hash("ada")
BEFORE = Placement.of([0])
AFTER = Placement.of([0, 1], keys={ADA: 1})

workers = {w: Distributor(w, BEFORE, [0, 1]) for w in (0, 1)}
counts: dict[int, dict[int, int]] = {0: {}, 1: {}}
links: deque[tuple[int, int, m.Message]] = deque()


def feed(worker: int, event: m.Event) -> None:
    """What a driver does: give an event, carry out the commands in order."""
    for command in workers[worker].handle(event):
        match command:
            case m.Process(batch):
                for key in batch.hashes.tolist():
                    counts[worker][key] = counts[worker].get(key, 0) + 1
                    print(f"worker {worker} counts ada to {counts[worker][key]}")
            case m.Send(to, message):
                links.append((worker, to, message))
            case m.Interrogate():
                keys = Rows(Item(key, worker, 0) for key in counts[worker])
                leaving = workers[worker].migration_now().leaving(worker, keys.hashes)
                feed(worker, m.Interrogated(Order.of([keys.hashes[leaving]])))
            case m.Collect(parts):
                states = [{k: counts[worker][k] for k in part.tolist()} for _, part in parts]
                feed(worker, m.Collected(tuple(states)))
            case m.Take(_, state):
                counts[worker] |= state
            case m.Drop(hashes):
                for key in hashes.tolist():
                    counts[worker].pop(key, None)
            case m.Completed():
                print(f"worker {worker} is through")


def send(worker: int, seq: int) -> None:
    """A record for ada arrives at a worker."""
    feed(worker, m.Local(Rows([Item(ADA, worker, seq)])))


def run() -> None:
    """Deliver what is under way, and let keys move, until all is quiet."""
    while links or any(worker.movable for worker in workers.values()):
        if links:
            sender, to, message = links.popleft()
            feed(to, m.Received(sender, message))
        for name, worker in workers.items():
            if worker.movable:
                feed(name, m.Move())


send(0, 1)
send(1, 1)
run()
print("rescale: ada moves from worker 0 to worker 1")
for name in workers:
    feed(name, m.Rescale(1, AFTER))
send(1, 2)
run()
send(0, 2)
run()
assert counts == {0: {}, 1: {ADA: 4}}
print("ada was counted 4 times, and lives at worker 1 alone")
