"""`asyncio.run` in user code works on workers, whose own event loop runs in the same thread."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.engine.controller import flows
from tests.engine.controller.flows import eventually, started

from railgun import Collect, Flow, Items, Place, Reader, Sink, Snapshots, Source, Stateful, Writer
from railgun.flows.sink import TwoPhaseSink, TwoPhaseWriter
from railgun.testing import FlowTester

RECORDS = 40
T = TypeVar("T")


def wait(directory: str, hook: str, value: T) -> T:
    """Do what takes an event loop of its own, note that `hook` did it, and return `value`."""

    async def work() -> T:
        first, _ = await asyncio.gather(asyncio.sleep(0, value), asyncio.to_thread(int))
        return first

    value = asyncio.run(work())
    (Path(directory) / hook).touch()
    return value


class Numbers(Source[int]):
    def __init__(self, directory: str) -> None:
        self.directory = directory

    def partitions(self) -> Sequence[str]:
        return wait(self.directory, "partitions", ["a", "b"])

    def open(self, partition: Any, position: Any) -> Reader[int]:
        return wait(self.directory, "open", _Numbers(self.directory, position or 0))


class _Numbers(Reader[int]):
    def __init__(self, directory: str, position: int) -> None:
        self.directory = directory
        self.position = position

    def read(self, most: int, now: int) -> Sequence[int] | None:
        if self.position >= RECORDS:
            ended = (Path(self.directory) / "end").exists()
            return wait(self.directory, "read", None if ended else [])
        self.position += 1
        return [self.position]

    def close(self) -> None:
        wait(self.directory, "close of a reader", None)


class Kept(TwoPhaseSink[Any]):
    """A sink in two phases that keeps nothing: what matters is that it is called."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def open(self, place: Place) -> TwoPhaseWriter[Any]:
        return wait(self.directory, "open of a sink", _Kept(self.directory))

    def commit(self, token: Any) -> None:
        wait(self.directory, "commit", None)

    def recover(self, flow: str, step: str, generation: int, tokens: Iterable[Any]) -> None:
        wait(self.directory, "recover", None)


class _Kept(TwoPhaseWriter[Any]):
    def __init__(self, directory: str) -> None:
        self.directory = directory

    def write(self, items: Sequence[Any]) -> None:
        wait(self.directory, "write", None)

    def flush(self) -> None:
        wait(self.directory, "flush", None)

    def prepare(self, snapshot: int) -> Any:
        return wait(self.directory, "prepare", "token")

    def close(self) -> None:
        wait(self.directory, "close of a writer", None)


class Lines(Sink[Any]):
    """A file with a line for each item."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def open(self, place: Place) -> Writer[Any]:
        return _Lines(
            self.directory, Path(self.directory) / f"out.{place.worker}.{place.generation}"
        )


class _Lines(Writer[Any]):
    def __init__(self, directory: str, path: Path) -> None:
        self.directory = directory
        self.path = path

    def write(self, items: Sequence[Any]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{item}\n" for item in wait(self.directory, "write of lines", items))


class Each(Stateful[int, int, int, int]):
    def __init__(self, directory: str) -> None:
        self.directory = directory

    def initial(self) -> int:
        return wait(self.directory, "initial", 0)

    def on_item(self, item: int, context: Any) -> Iterable[int]:
        context.state += 1
        context.set_timer(context.time + 1_000)
        yield wait(self.directory, "on_item", item)

    def on_timer(self, context: Any) -> Iterable[int] | None:
        return wait(self.directory, "on_timer", ())

    def on_end(self, context: Any) -> Iterable[int] | None:
        return wait(self.directory, "on_end", ())


def waiting_everywhere(directory: str) -> Flow:
    """A flow all of whose hooks call `asyncio.run`."""
    flow = Flow("waiting")
    numbers = (
        flow.source(Numbers(directory), name="numbers")
        .map(lambda n: wait(directory, "map", n))
        .filter(lambda n: wait(directory, "filter", True))
        .flat_map(lambda n: wait(directory, "flat_map", [n]))
        .map_batches(lambda some: wait(directory, "map_batches", some))
        .inspect(lambda n: wait(directory, "inspect", None))
    )
    keyed = numbers.key_by(lambda n: wait(directory, "key_by", n % 5))
    counted = keyed.stateful_map(
        lambda state, n: wait(directory, "stateful_map", (state + 1, n)),
        initial=lambda: wait(directory, "initial of stateful_map", 0),
    )
    last = counted.reduce(lambda a, b: wait(directory, "reduce", b)).stateful(Each(directory))
    last.sink(Lines(directory), name="lines")
    last.sink(Kept(directory), name="kept")
    return flow


HOOKS = {
    *("partitions", "open", "read", "close of a reader", "map", "filter", "flat_map"),
    *("map_batches", "inspect", "key_by", "stateful_map", "initial of stateful_map", "reduce"),
    *(
        "initial",
        "on_item",
        "on_timer",
        "on_end",
        "open of a sink",
        "write",
        "prepare",
        "commit",
    ),
    *("close of a writer", "write of lines"),
}


def test_every_hook_may_run_an_event_loop_on_a_worker(tmp_path: Path) -> None:
    directory = tmp_path / "hooks"
    directory.mkdir()
    flow = waiting_everywhere(str(directory))
    by_value = [sys.modules[__name__], flows]
    snapshots = Snapshots(str(tmp_path / "snapshots"), every=1000.0)
    with started(flow, snapshots=snapshots, by_value=by_value) as job:

        def lines() -> list[int]:
            return sorted(int(n) for f in directory.glob("out.*") for n in f.read_text().split())

        expected = sorted([*range(1, RECORDS + 1)] * 2)
        eventually(lambda: lines() == expected, "all records came through")
        job.snapshot()
        job.scale(3)
        eventually(lambda: len(job.status()["workers"]) == 3, "the worker's own loop is at work")
        (directory / "end").touch()
        job.wait(timeout=flows.DEADLINE)
        assert lines() == expected
    assert {path.name for path in directory.iterdir()} >= HOOKS


def test_every_hook_may_run_an_event_loop_in_a_tester(tmp_path: Path) -> None:
    tester = FlowTester(waiting_everywhere(str(tmp_path)), snapshots=True)
    tester.settle()
    tester.snapshot()
    tester.advance(1.0)
    (tmp_path / "end").touch()
    tester.finish()
    assert {path.name for path in tmp_path.iterdir()} >= HOOKS


def loop_of_the_thread(n: int) -> int:
    loop = asyncio.get_event_loop_policy().get_event_loop()
    return loop.run_until_complete(asyncio.sleep(0, n))


def test_the_event_loop_of_the_thread_is_not_that_of_the_worker() -> None:
    flow = Flow("policy")
    flow.source(Items(range(10)), name="numbers").map(loop_of_the_thread).sink(
        Collect(), name="out"
    )
    with started(flow, by_value=[sys.modules[__name__], flows]) as job:
        job.wait(timeout=flows.DEADLINE)
        assert sorted(job.collected("out")) == list(range(10))
