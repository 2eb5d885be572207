"""What it costs to find the owner of a key: hashing a batch of keys and looking up their workers.

Every record that crosses a distributor pays this, so text keys have a goal; the other figures are
only told. The peer, measured in the same run on the same keys, is a loop over Python's own
hash(), which is not stable and does not know an owner yet. Python keeps the hash of a str with
it, so the loop is measured twice: on keys it has seen before, and on fresh ones, as those of a
batch that has just been decoded are. Ours keeps nothing.

The machine may be busy with other things; what it can do is the best of many repetitions. One
thing is not noise: where no large block was ever freed, glibc may hand the memory of a batch back
to the system after every batch and fetch it again, page by page, which can double the cost. The
goal is for a process that has freed one (a worker can do so on purpose when it starts); the figure
from before is told beside it.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from verification.report import Report, options

from railgun.engine.protocol.placement import Placement
from railgun.hashing import hash_keys

ROWS = 10_000
WORKERS = 16
HOT_KEYS = 8
GOAL = 60  # ns for a text key

WORDS = [f"customer-{n:05d}" for n in range(ROWS)]

# Further batches, and the share of the repetitions that each gets: the general path is slow.
OTHERS: dict[str, tuple[Sequence[Any], float]] = {
    "long str (100 characters)": ([f"{word:x>100}" for word in WORDS], 0.5),
    "non-ASCII str": ([f"Müller-{n:05d}-東京" for n in range(ROWS)], 0.5),
    "int": (list(range(ROWS)), 1),
    "bytes": ([word.encode() for word in WORDS], 1),
    "tuple (str, int)": ([(word, n) for n, word in enumerate(WORDS)], 0.05),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; the exit code tells whether the goal is met."""
    chosen, console = options("bench placement", (__doc__ or "").partition("\n")[0], argv)
    report = Report("placement")
    measure(report, repetitions=100 if chosen.quick else 1_000, console=console)
    return report.finish(chosen)


def measure(report: Report, repetitions: int, console: Console) -> None:
    """Add all that is measured to the report."""
    placement = Placement.of(range(WORKERS))

    def tell(name: str, ns: float) -> None:
        report.check(name, round(ns, 1), "ns/key")
        console.print(f"{name}: {ns:.1f} ns/key", style="dim")

    def owners(keys: Sequence[Any]) -> object:
        return placement.owners(hash_keys(keys))

    young = best_ns(owners, lambda: WORDS, repetitions)
    free_a_large_block()
    ours = best_ns(owners, lambda: WORDS, repetitions)
    report.check("str to owner", round(ours, 1), "ns/key", f"< {GOAL} ns/key", ours < GOAL)
    tell("str to owner, before a large block was freed", young)
    seen = best_ns(python_hashes, lambda: WORDS, repetitions)
    tell("peer: a loop over hash(), keys seen before", seen)
    fresh = best_ns(python_hashes, fresh_words, repetitions)
    tell("peer: a loop over hash(), fresh keys", fresh)
    report.check("str to owner / peer, keys seen before", round(ours / seen, 2), "times")
    report.check("str to owner / peer, fresh keys", round(ours / fresh, 2), "times")

    for name, (keys, share) in OTHERS.items():
        tell(f"{name} to owner", best_ns(owners, partial(list, keys), int(repetitions * share)))

    hashes = hash_keys(WORDS)
    tell("owner lookup alone", best_ns(placement.owners, lambda: hashes, repetitions))
    hot = Placement.of(range(WORKERS), keys=dict.fromkeys(hashes[:HOT_KEYS].tolist(), 0))
    tell(
        f"owner lookup alone, {HOT_KEYS} hot keys", best_ns(hot.owners, lambda: hashes, repetitions)
    )


def free_a_large_block() -> None:
    """Make glibc keep what is freed: its limits follow the largest block freed, up to 32 MB."""
    bytes(24 << 20)


def python_hashes(keys: Sequence[Any]) -> list[int]:
    """The peer."""
    return [hash(key) for key in keys]


def fresh_words() -> list[str]:
    """The words as new objects, whose hashes Python has not worked out yet."""
    return ",".join(WORDS).split(",")


def best_ns(work: Callable[[Any], object], keys: Callable[[], Any], repetitions: int) -> float:
    """The least time `work` took for a batch, in ns per key; making the keys is not timed."""
    best = math.inf
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repetitions):
            batch = keys()
            start = time.perf_counter_ns()
            work(batch)
            best = min(best, time.perf_counter_ns() - start)
    finally:
        if collecting:
            gc.enable()
    return best / ROWS
