"""The work of `throughput` in one process, without sockets and Spark: for counting instructions on a busy machine.

Keys batches of 5,000 records, encodes and decodes half of the columns, and sums by key. The difference of two runs
is free of what it takes to start:

    valgrind --tool=callgrind --callgrind-out-file=/dev/null .venv/bin/python -m bench._keyed 20    # batches
    valgrind --tool=callgrind --callgrind-out-file=/dev/null .venv/bin/python -m bench._keyed 60

Without valgrind it prints the least processor time a record.
"""

from __future__ import annotations

import random
import sys
import time
from operator import itemgetter

from bench._workload import KEYS, add
from railgun.engine.operators.operator import Setting
from railgun.engine.operators.stateful import Reduce
from railgun.engine.operators.stateless import KeyBy
from railgun.transport.columns import decode_column, encode_column
from railgun.transport.rows import RowBatch

SIZE = 5_000


def main(count: int) -> None:
    """Process `count` batches."""
    chance = random.Random(1)
    batches = [
        [(f"key-{chance.randrange(KEYS):05d}", chance.randrange(100)) for _ in range(SIZE)]
        for _ in range(4)
    ]
    summed = Reduce(Setting("sum"), add)

    def deliver(batch: RowBatch) -> None:
        assert batch.keys is not None
        half = len(batch) // 2
        for column in (batch.keys[:half], batch.values[:half]):
            decode_column(encode_column(column), half)
        summed.push(batch)

    keyed = KeyBy(Setting("by key"), itemgetter(0), itemgetter(1), 0, deliver)
    least_ns = sys.maxsize
    for n in range(count):
        began_ns = time.process_time_ns()
        keyed.push(RowBatch(batches[n % 4], 0))
        keyed.flush()
        least_ns = min(least_ns, time.process_time_ns() - began_ns)
    print(f"{least_ns / SIZE:.0f} ns a record")


if __name__ == "__main__":
    main(int(sys.argv[1]))
