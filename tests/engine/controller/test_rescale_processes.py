"""Two stages with state on real processes, rescaled while they are busy, overloaded, or about to end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.engine.controller import flows
from tests.engine.controller.flows import Record, eventually, in_order, running, started

from railgun import Collect, Context, Event, Flow, Generate, Reader, Source, Stateful
from railgun.job import Job

KEYS = 300
GROUPS = 17


def numbered(index: int, chance: Random) -> Record:
    """Every part has keys of its own, so a key's records are in order."""
    part, turn = index % 4, index // 4
    return part * KEYS + turn % KEYS, turn // KEYS


class InOrderByKey(Stateful[int, Record, dict[int, int], Record]):
    """The second stage sees several keys of the first: each has to come in order."""

    def __init__(self, slow: float = 0.0) -> None:
        self.slow = slow

    def initial(self) -> dict[int, int]:
        return {}

    def on_item(self, item: Any, context: Context[int, dict[int, int]]) -> Iterable[Record]:
        key, number = item[:2]
        if number != context.state.get(key, -1) + 1:
            raise AssertionError(f"{item} came after {context.state.get(key)}")
        context.state[key] = number
        if self.slow:
            time.sleep(self.slow)
        return ((key, number),)

    def on_end(self, context: Context[int, dict[int, int]]) -> Iterable[Record]:
        return [(-1 - key, number) for key, number in context.state.items()]


def sized(index: int, chance: Random) -> Any:
    return *numbered(index, chance), bytes(1_000)


def two_stages(name: str, source: Source[Any], slow: float = 0.0) -> Flow:
    flow = Flow(name)
    records = flow.source(source, name="records")
    first = records.key_by(lambda item: item[0], name="first").stateful_map(
        in_order, initial=lambda: -1, name="order"
    )
    second = first.key_by(lambda item: item[0] % GROUPS, name="second")
    second.stateful(InOrderByKey(slow), name="order again").sink(Collect(), name="out")
    return flow


def check(job: Job) -> int:
    """Every record is there once, and each key's end tells of its last one."""
    found = job.collected("out")
    counts = Counter(key for key, _ in found if key >= 0)
    assert len(set(found)) == len(found), "none twice"
    last = {-1 - key: number for key, number in found if key < 0}
    assert {key: number + 1 for key, number in last.items()} == counts, "none lost"
    return sum(counts.values())


BY_VALUE = [sys.modules[__name__], flows]


def test_two_stages_keep_order_through_rescales() -> None:
    flow = two_stages("two-stages", Generate(numbered, rate=20_000, partitions=4))
    with started(flow, 2, by_value=BY_VALUE) as job:
        running(job, records=1_000)
        for workers in (4, 1, 3):
            job.scale(workers, wait=True, timeout=flows.DEADLINE)
            assert job.status()["size"] == workers
            flows.more(job, records=500)
        assert job.stop(timeout=flows.DEADLINE)
        assert job.status()["failures"] == 0
        assert check(job) > 2_500


def memory(job: Job) -> int:
    """The bytes the largest worker holds."""
    sizes = []
    for pid in flows.pids(job):
        try:
            text = Path(f"/proc/{pid}/statm").read_text()
        except OSError:
            continue
        sizes.append(int(text.split()[1]) * 4096)
    return max(sizes, default=0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks at /proc")
def test_an_overloaded_flow_stays_small_and_can_be_rescaled() -> None:
    flow = two_stages("overloaded", Generate(sized, partitions=4), slow=0.000_05)
    with started(flow, 2, by_value=BY_VALUE) as job:
        running(job, records=1_000)
        eventually(lambda: any(w.get("resting") for w in job.status()["workers"]), "sources rest")
        before = memory(job)
        for workers in (3, 1):
            job.scale(workers, wait=True, timeout=flows.DEADLINE)
            flows.more(job, records=100)
            assert memory(job) < before + (64 << 20)
        assert job.stop(timeout=flows.DEADLINE)
        assert job.status()["failures"] == 0
        assert check(job) > 2_000


class Until(Generate[Record]):
    """Numbered records until a file appears."""

    def __init__(self, path: str) -> None:
        super().__init__(numbered, rate=20_000, partitions=4)
        self.path = path

    def open(self, partition: Any, position: Any) -> Reader[Record]:
        return UntilReader(self, super().open(partition, position))


class UntilReader(Reader[Record]):
    def __init__(self, source: Until, reader: Reader[Record]) -> None:
        self.source, self.reader = source, reader
        self.position = reader.position

    def read(self, most: int, now: int) -> Any:
        if Path(self.source.path).exists():
            return None
        made = self.reader.read(most, now)
        self.position = self.reader.position
        return made


@pytest.mark.parametrize("goal", [1, 4])
def test_sources_end_while_stages_move(goal: int, tmp_path: Path) -> None:
    end = tmp_path / "end"

    def watch(event: Event) -> None:
        if event.kind == "rescaling":
            end.touch()

    flow = two_stages(f"ends-{goal}", Until(str(end)))
    with started(flow, 2, by_value=BY_VALUE, watch=watch) as job:
        running(job, records=2_000)
        job.scale(goal)
        assert job.wait(flows.DEADLINE)
        assert job.status()["failures"] == 0
        assert flows.kinds(job) == ["running", "rescaling", "rescaled", "finished"]
        assert check(job) >= 2_000
