"""What is certain to fail again fails the flow at once; what may be a mistake is told by name. On real processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.controller import flows
from tests.engine.controller.flows import eventually, started

from railgun import Collect, Flow, FlowFailedError, Generate, Items
from railgun.flows.source import Reader, Source
from railgun.job import Job, Snapshots

HERE = sys.modules[__name__]


class Keeper:
    """State that pickle refuses."""

    def __init__(self) -> None:
        self.lines = (line for line in "ab")


def failed(job: Job) -> str:
    """Wait for the end, which has come at once; the cause."""
    with pytest.raises(FlowFailedError) as told:
        assert job.wait(flows.DEADLINE)
    assert "restarting" not in flows.kinds(job), "it would come again"
    return str(told.value)


def stateful(name: str, keep: Any) -> Flow:
    flow = Flow(name)
    numbers = flow.source(Generate(lambda index, chance: index % 7, rate=500), name="numbers")
    numbers.key_by(lambda n: n).stateful_map(keep, initial=lambda: None, name="keep").sink(
        Collect(), name="out"
    )
    return flow


@pytest.mark.parametrize("saves", [False, True])
def test_state_that_cannot_be_pickled_is_found_at_its_first_use(
    tmp_path: Path, saves: bool
) -> None:
    flow = stateful("unpicklable", lambda state, n: (state or Keeper(), n))
    snapshots = Snapshots(str(tmp_path), every=3600) if saves else None
    with started(flow, by_value=[flows, HERE], snapshots=snapshots) as job:
        told = failed(job)
    assert "step 'keep': the state of key " in told
    assert "is of type Keeper, and cannot be pickled" in told
    assert "generator" in told


def later(state: Any, n: int) -> tuple[Any, int]:
    """Becomes what cannot be pickled after a while, for one key."""
    if isinstance(state, Keeper):
        return state, n
    count = (state or 0) + 1
    return (Keeper() if n == 3 and count > 20 else count), n


def test_state_that_becomes_unpicklable_fails_the_flow_at_the_next_snapshot(tmp_path: Path) -> None:
    flow = stateful("later", later)
    snapshots = Snapshots(str(tmp_path), every=0.5)
    with started(flow, by_value=[flows, HERE], snapshots=snapshots) as job:
        told = failed(job)
    assert "step 'keep'" in told
    assert "Keeper of key 3 cannot be saved" in told


def test_state_that_becomes_unpicklable_fails_the_rescale_that_moves_it() -> None:
    with started(stateful("moves", later), 1, by_value=[flows, HERE]) as job:
        eventually(lambda: len(job.collected("out")) > 400, "it has become so")
        with pytest.raises(FlowFailedError, match=r"state of key 3 is of type Keeper"):
            job.scale(5, wait=True, timeout=flows.DEADLINE)
        assert "restarting" not in flows.kinds(job)


class BrokenError(Exception):
    """Can be pickled, and not unpickled: it is made with another number of arguments than it keeps."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


@pytest.mark.parametrize("saves", [False, True])
def test_state_that_cannot_be_unpickled_is_found_at_its_first_use(
    tmp_path: Path, saves: bool
) -> None:
    flow = stateful("unloadable", lambda state, n: (state or BrokenError(1, "no"), n))
    snapshots = Snapshots(str(tmp_path), every=3600) if saves else None
    with started(flow, by_value=[flows, HERE], snapshots=snapshots) as job:
        told = failed(job)
    assert "step 'keep': the state of key " in told
    assert "is of type BrokenError" in told
    assert "cannot be unpickled" in told
    assert "missing 1 required positional argument: 'why'" in told


def later_broken(state: Any, n: int) -> tuple[Any, int]:
    """Becomes what cannot be unpickled after a while, for one key."""
    if isinstance(state, BrokenError):
        return state, n
    count = (state or 0) + 1
    return (BrokenError(1, "no") if n == 3 and count > 20 else count), n


def test_no_snapshot_is_committed_with_a_state_that_cannot_be_unpickled(tmp_path: Path) -> None:
    snapshots = Snapshots(str(tmp_path), every=0.5)
    flow = stateful("refused", later_broken)
    with started(flow, by_value=[flows, HERE], snapshots=snapshots) as job:
        told = failed(job)
    assert "step 'keep'" in told
    assert "BrokenError of key 3" in told
    assert "cannot be unpickled" in told
    with started(flow, by_value=[flows, HERE], snapshots=snapshots) as job:
        flows.running(job)


def test_state_that_cannot_be_unpickled_fails_the_rescale_that_moves_it() -> None:
    with started(stateful("moves-refused", later_broken), 1, by_value=[flows, HERE]) as job:
        eventually(lambda: len(job.collected("out")) > 400, "it has become so")
        with pytest.raises(FlowFailedError, match=r"state of key 3 is of type BrokenError"):
            job.scale(5, wait=True, timeout=flows.DEADLINE)
        assert "restarting" not in flows.kinds(job)


def test_results_that_the_program_cannot_unpickle_fail_the_flow_at_once() -> None:
    flow = Flow("uncollected")
    numbers = flow.source(Generate(lambda index, chance: index, rate=500), name="numbers")
    numbers.map(lambda n: BrokenError(n, "no"), name="make").sink(Collect(), name="out")
    with started(flow, by_value=[flows, HERE]) as job:
        told = failed(job)
    assert "sink 'out'" in told
    assert "BrokenError.__init__() missing 1 required positional argument: 'why'" in told


def test_records_that_another_worker_cannot_unpickle_fail_the_flow_at_once() -> None:
    flow = Flow("unreceived")
    numbers = flow.source(Generate(lambda index, chance: index, rate=500), name="numbers")
    made = numbers.map(lambda n: (n, BrokenError(n, "no")), name="make")
    made.key_by(lambda item: item[0], name="keys").stateful_map(
        lambda state, item: (0, 0), initial=lambda: 0, name="count"
    ).sink(Collect(), name="out")
    with started(flow, by_value=[flows, HERE]) as job:
        told = failed(job)
    assert "step 'keys'" in told
    assert "BrokenError.__init__() missing 1 required positional argument: 'why'" in told


class Fragile:
    """Cannot be made again once a file is there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        if Path(self.path).exists():
            raise ValueError("broken by now")


def test_a_snapshot_with_a_state_that_cannot_be_unpickled_any_more_fails_at_once(
    tmp_path: Path,
) -> None:
    mark = str(tmp_path / "broken")
    flow = stateful("fragile", lambda state, n: (state or Fragile(mark), n))
    saved = Snapshots(str(tmp_path / "snapshots"), every=3600)
    with started(flow, by_value=[flows, HERE], snapshots=saved) as job:
        eventually(lambda: len(job.collected("out")) > 20, "all keys have state")
        assert job.stop(timeout=flows.DEADLINE)
    Path(mark).touch()
    with started(flow, by_value=[flows, HERE], snapshots=saved) as job:
        told = failed(job)
    assert "step 'keep'" in told
    assert "for key " in told
    assert "broken by now" in told


def test_records_that_cannot_be_sent_to_another_worker_fail_the_flow_at_once() -> None:
    flow = Flow("unsent")
    numbers = flow.source(Generate(lambda index, chance: index, rate=500), name="numbers")
    made = numbers.map(lambda n: (n, Keeper()), name="make")
    made.key_by(lambda item: item[0], name="keys").stateful_map(
        lambda state, item: (0, 0), initial=lambda: 0, name="count"
    ).sink(Collect(), name="out")
    with started(flow, by_value=[flows, HERE]) as job:
        told = failed(job)
    assert "cannot be sent to another worker" in told
    assert "generator" in told


def needs_a_module(n: int) -> int:
    import no_such_module_anywhere  # type: ignore[import-not-found]  # noqa: F401

    return n


class Parts(Source[int]):
    """Lists what it is told to."""

    bounded = True

    def __init__(self, parts: Sequence[Any], missing: str = "") -> None:
        self.parts = parts
        self.missing = missing

    def partitions(self) -> Sequence[Any]:
        """The parts; or those in a directory that is not there."""
        return list(Path(self.missing).iterdir()) if self.missing else self.parts

    def open(self, partition: Any, position: Any) -> Reader[int]:
        """Nobody comes here."""
        raise AssertionError


@pytest.mark.parametrize("what", ["module", "unhashable part", "missing directory"])
def test_what_is_certain_to_fail_again_fails_at_once(what: str, tmp_path: Path) -> None:
    flow = Flow("certain")
    source: Source[int] = Items([1])
    if what == "unhashable part":
        source = Parts([["a", "list"]])
    elif what == "missing directory":
        source = Parts([], missing=str(tmp_path / "not-there"))
    numbers = flow.source(source, name="numbers")
    numbers.map(needs_a_module if what == "module" else str, name="step").sink(
        Collect(), name="out"
    )
    snapshots = Snapshots(str(tmp_path / "snapshots"), every=3600)
    with started(flow, by_value=[flows, HERE], snapshots=snapshots) as job:
        told = failed(job)
    expected = {
        "module": ("step 'step'", "no_such_module_anywhere"),
        "unhashable part": ("source 'numbers'", "unhashable"),
        "missing directory": ("source 'numbers'", "not-there"),
    }[what]
    for word in expected:
        assert word in told


# ---------------------------------------------------------------- snapshots of another flow


class Wheels(Source[int]):
    """Parts that come and go: each turns for itself."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def partitions(self) -> Sequence[int]:
        """The parts there are now."""
        return range(self.parts)

    def open(self, partition: Any, position: Any) -> Reader[int]:
        """Turn a part."""
        return Generate(lambda index, chance: index % 7, rate=500).open(0, position)


def keyed(key: Any, parts: int) -> Flow:
    flow = Flow("changed")
    flow.source(Wheels(parts), name="numbers").key_by(key, name="keys").reduce(
        lambda a, b: a + b, name="total"
    ).sink(Collect(), name="out")
    return flow


def warnings(job: Job) -> list[str]:
    return [event.text for event in job.events() if event.kind == "warning"]


def test_keys_of_another_type_and_parts_that_are_gone_are_told_by_name(tmp_path: Path) -> None:
    saved = Snapshots(str(tmp_path), every=3600)
    with started(keyed(str, 3), by_value=[flows, HERE], snapshots=saved) as job:
        flows.running(job)
        assert job.stop(timeout=flows.DEADLINE)
        assert warnings(job) == []
    with started(keyed(str, 3), by_value=[flows, HERE], snapshots=saved) as job:
        flows.running(job)
        assert job.stop(timeout=flows.DEADLINE)
        assert warnings(job) == [], "nothing has changed"
    with started(keyed(int, 2), by_value=[flows, HERE], snapshots=saved) as job:
        told = eventually(lambda: len(found := warnings(job)) > 1 and "\n".join(found), "a warning")
    assert "step 'total': the snapshot has keys of type str ('" in told
    assert "makes keys of type int (" in told
    assert (
        "source 'numbers': the snapshot has positions in parts that the source does not have"
        in told
    )
    gone = [text.partition(" now: ")[2] for text in told.split("\n") if "'numbers'" in text]
    assert gone == ["2"], "told once"
