"""The work that `throughput` gives to everyone: a running sum per key, by a Python function.

Records are (key, value) with one of 10,000 strings as the key and a small int as the value; every
record gives one output, the new sum of its key, which is counted and dropped. Nothing but the
standard library is imported here: peers read this in environments of their own.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

KEYS = 10_000
CORES = 2

Batch = tuple[list[str], list[int]]
"""The keys and the values of some records."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast someone did the work, once warm.

    Records a second are what counts. Processor time a record tells the same when the machine is
    busy with other things: on idle cores an engine that never waits does CORES / processor time.

    >>> Rate.of_line(Rate(2_000_000.0, 950.0, "example 1.0").as_line()).engine
    'example 1.0'
    """

    records_per_second: float
    processor_ns: float  # of processor time a record, in all processes together
    engine: str

    @property
    def cores(self) -> float:
        """The cores it had at work: fewer than CORES if it waited, or if others used them."""
        return self.records_per_second * self.processor_ns / 1e9

    def as_line(self) -> str:
        """The last line that a peer prints."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_line(line: str) -> Rate:
        """What a peer told."""
        return Rate(**json.loads(line))


def add(total: int, value: int) -> int:
    """The user's function."""
    return total + value


def names() -> list[str]:
    """All the keys."""
    return [f"customer-{number:05d}" for number in range(KEYS)]


def batches(source: int, size: int, records: int = 500_000) -> list[Batch]:
    """What source number `source` repeats for ever, made beforehand: about `records` in all.

    >>> keys, values = batches(source=0, size=3)[0]
    >>> keys, values
    (['customer-08444', 'customer-07579', 'customer-04205'], [33, 65, 62])
    """
    known = names()
    chance = random.Random(source)
    made = []
    for _ in range(max(1, records // size)):
        keys = chance.choices(known, k=size)
        made.append((keys, [chance.randrange(100) for _ in range(size)]))
    return made
