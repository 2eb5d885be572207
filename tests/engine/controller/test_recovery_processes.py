"""Snapshots on real processes: whatever dies when, the committed output is that of an undisturbed run."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.controller import flows, tallies
from tests.engine.controller.flows import eventually, pids
from tests.engine.controller.tallies import (
    KEYS,
    Tail,
    check,
    committed,
    drained,
    expected,
    gone,
    kill,
    output,
    recovered,
    saved,
    store,
    tally,
    told,
)

from railgun import FORGET, Collect, Event, Files, Flow, FlowFailedError, Generate, Settings
from railgun.engine.controller.controller import Controller
from railgun.engine.controller.storekeeper import FinishedError, Storekeeper
from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.snapshots.errors import DamagedError, DoesNotFitError
from railgun.flows.sink import Place, TwoPhaseWriter, Writer
from railgun.job import Job, NotSavedError, Snapshots
from railgun.storage.errors import LockedError

NEVER = 1_000.0
PATIENT = Settings(restarts_within=0.01)  # failures do not add up: they are many, and on purpose


def started(flow: Flow, workers: int = 2, **options: Any) -> Any:
    options.setdefault("by_value", [sys.modules[__name__], tallies, flows])
    return flows.started(flow, workers, **options)


def ended(job: Job) -> None:
    assert job.wait(flows.DEADLINE)


def is_running(job: Job) -> None:
    eventually(lambda: job.status()["state"] == "running", "it runs")


# ---------------------------------------------------------------- workers that are lost


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_dies_or_freezes_and_the_flow_goes_on_from_the_snapshot(
    how: signal.Signals, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flow = tallies.tallies(out, parquet=how is signal.SIGKILL)
    heard: list[Event] = []
    options: dict[str, Any] = {"settings": Settings(hang_after=1.5), "watch": heard.append}
    with started(flow, snapshots=saved(tmp_path), **options) as job:
        number = committed(job, 2)
        victim = kill(job, 1, how)
        recovered(job)
        committed(job)
        [why] = told(job, "restarting")
        assert "worker 1 is lost" in why
        back = int(why.rpartition(" ")[2])
        assert why.endswith(f"goes back to snapshot {back}")
        assert back >= number
        assert f"running on 2 workers, from snapshot {back}" in told(job, "running")
        gone([victim])
        drained(job, out)
    texts = {e.data["snapshot"]: e.text for e in heard if e.kind.startswith("snapshot")}
    assert sorted(texts) == list(range(1, len(texts) + 1))
    assert all(text.startswith(f"snapshot {number} ") for number, text in texts.items())


class Moments:
    """Calls a function when a snapshot comes to certain moments, in the thread of the controller."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wanted = ""
        self.strike: Callable[[], object] = lambda: None
        for kind, name, moment in (
            (Storekeeper, "record", "recording"),
            (Controller, "_send", "cutting"),
            (Storekeeper, "saved", "saving"),
            (Storekeeper, "write", "writing"),
            (Storekeeper, "written", "publishing"),
        ):
            patch.setattr(kind, name, self._wrapped(getattr(kind, name), moment))

    def _wrapped(self, method: Callable[..., None], moment: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            method(*args)
            cut = moment != "cutting" or isinstance(args[2], o.TakeSnapshot)
            if moment == self.wanted and cut:
                self.wanted = ""
                self.strike()

        return call

    def at(self, moment: str, strike: Callable[[], object]) -> None:
        self.strike, self.wanted = strike, moment


@pytest.mark.slow
def test_a_worker_dies_at_every_moment_of_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    moments = Moments(monkeypatch)
    with started(tallies.tallies(out), snapshots=saved(tmp_path), settings=PATIENT) as job:
        committed(job)
        for turn, moment in enumerate(("recording", "cutting", "saving", "writing", "publishing")):
            moments.at(moment, lambda victim=turn % 2: kill(job, victim))  # type: ignore[misc]
            recovered(job, turn + 1)
            committed(job)
        failed = len(told(job, "snapshot-failed"))
        assert failed >= 2, "what was begun and lost is told"
        drained(job, out)
    states = [attempt.state for attempt in store(tmp_path).attempts()]
    assert states.count("failed") == failed
    assert set(states) == {"committed", "failed"}


def test_whoever_asked_for_a_snapshot_that_is_lost_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    moments = Moments(monkeypatch)
    with started(tallies.tallies(out), snapshots=saved(tmp_path, NEVER)) as job:
        is_running(job)
        moments.at("cutting", lambda: kill(job, 1))
        with pytest.raises(NotSavedError, match=r"snapshot 1 is given up: worker 1 is lost"):
            job.snapshot(timeout=flows.DEADLINE)
        recovered(job)
        assert "the flow starts again from its sources" in told(job, "restarting")[0]
        assert job.snapshot(timeout=flows.DEADLINE) == 2
        drained(job, out)


def test_a_worker_dies_during_a_rescale_and_another_while_the_flow_goes_back(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with started(tallies.tallies(out), snapshots=saved(tmp_path), settings=PATIENT) as job:
        committed(job)
        job.scale(4)
        eventually(lambda: "rescaling" in flows.kinds(job), "the rescale begins")
        kill(job, 0)
        eventually(lambda: told(job, "restarting"), "it is noticed")
        kill(job, 1)  # which loads, or is about to, or is ready: then it is a failure of its own
        eventually(
            lambda: len(told(job, "restarting")) == 2 or told(job, "trouble"), "it is noticed"
        )
        eventually(lambda: job.status()["state"] == "running", "it runs again")
        assert job.status()["size"] == 4
        drained(job, out)


def test_a_worker_dies_on_its_way_out_of_a_rescale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    send = Controller._send
    struck: list[int] = []

    def sending(self: Controller, worker: int, order: o.WorkerOrder) -> None:
        if isinstance(order, o.Stop) and order.handing_over and not struck:
            struck.append(worker)
            os.kill(
                self._processes[worker, self.lifecycle.members[worker].incarnation].who["pid"], 9
            )
        send(self, worker, order)

    monkeypatch.setattr(Controller, "_send", sending)
    with started(tallies.tallies(out), 3, snapshots=saved(tmp_path)) as job:
        committed(job)
        job.scale(2)
        recovered(job)
        assert "left, and what was to be saved of it is lost" in told(job, "restarting")[0]
        assert job.status()["size"] == 2
        drained(job, out)


def dies_at(number: int, item: tallies.Line) -> tallies.Line:
    if item[1] >= number:
        os._exit(3)
    return item


def test_failures_that_come_again_go_back_to_the_snapshot_and_then_fail_with_the_cause(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    flow = Flow("tallies")
    records = flow.source(Generate(tallies.record, rate=4_000), name="records")
    counted = records.key_by(lambda item: item[0]).stateful_map(tally, initial=int, name="tally")
    counted.map(lambda line: dies_at(40, line)).sink(Files(out), name="out")
    options: dict[str, Any] = {"snapshots": saved(tmp_path), "settings": Settings(restarts=2)}
    with started(flow, 1, **options) as job:
        with pytest.raises(FlowFailedError, match=r"worker 0 is lost.*failure 3 within"):
            job.wait(flows.DEADLINE)
        again = told(job, "restarting")
        assert len(again) == 2
        assert all("goes back to snapshot" in text for text in again)
    seen = output(out)
    assert all(number < 40 for _, number, _ in seen)
    assert len(seen) == len(set(map(tuple, seen)))


class Crowded(Files):
    """Files on a disk that is full while there is a file of this name beside them."""

    def open(self, place: Place) -> Writer[Any]:
        return Crowd(super().open(place), self.directory.parent / "full")


class Crowd(TwoPhaseWriter[Any]):
    def __init__(self, writer: Any, full: Path) -> None:
        self.writer, self.full = writer, full

    def write(self, items: Any) -> None:
        if self.full.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out")
        self.writer.write(items)

    def cut(self, snapshot: int) -> Any:
        return self.writer.cut(snapshot)

    def prepare(self, snapshot: int) -> Any:
        return self.writer.prepare(snapshot)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


@pytest.mark.parametrize("passes", [True, False])
def test_a_sink_with_a_full_disk_sends_the_flow_back_and_then_ends_it_with_the_cause(
    tmp_path: Path, passes: bool
) -> None:
    out = tmp_path / "out"
    flow = Flow("tallies")
    source = Generate(tallies.record, rate=4_000, partitions=tallies.PARTS)
    records = flow.source(source, name="records").key_by(lambda item: item[0])
    records.stateful_map(tally, initial=int, name="tally").sink(Crowded(out), name="out")
    settings = PATIENT if passes else Settings(restarts=1)
    with started(flow, snapshots=saved(tmp_path), settings=settings) as job:
        committed(job)
        (tmp_path / "full").touch()
        if passes:
            eventually(lambda: told(job, "restarting"), "it goes back")
            (tmp_path / "full").unlink()
            drained(job, out)
            assert all("goes back to snapshot" in text for text in told(job, "restarting"))
        else:
            with pytest.raises(FlowFailedError, match=r"(?s)sink 'out': Crowded.write.*No space"):
                job.wait(flows.DEADLINE)


# ---------------------------------------------------------------- the program that started it

DRIVER = """
import sys
from pathlib import Path
from railgun import run
from railgun.job import Snapshots
from railgun.testing.local_workers import SubprocessLauncher
from tests.engine.controller import tallies
from tests.engine.controller import flows
path = Path(sys.argv[1])
job = run(
    tallies.tallies(path / "out"), 3, launcher=SubprocessLauncher(), http=False,
    snapshots=Snapshots(str(path / "snapshots"), every=0.3), by_value=[tallies, flows],
)
tallies.committed(job, 2)
print(*flows.pids(job), flush=True)
job.wait()
"""


def test_the_program_is_killed_its_workers_end_and_the_next_goes_on_from_the_snapshot(
    tmp_path: Path,
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    there = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, script, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": there},
    ) as driver:
        assert driver.stdout is not None
        processes = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(processes) == 3
        driver.kill()
    gone(processes)
    left = store(tmp_path).latest()
    assert left is not None
    assert left.snapshot >= 2
    out = tmp_path / "out"
    with started(tallies.tallies(out), 2, snapshots=saved(tmp_path)) as job:
        committed(job)
        assert told(job, "running") == [f"running on 2 workers, from snapshot {left.snapshot}"]
        drained(job, out)


def test_a_flow_is_stopped_with_a_last_snapshot_and_goes_on_at_other_sizes_to_its_end(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    numbers = [0]
    for workers in (2, 3):
        with started(tallies.tallies(out), workers, snapshots=saved(tmp_path)) as job:
            committed(job)
            assert job.stop(timeout=flows.DEADLINE)
            assert flows.kinds(job)[-1] == "finished"
            numbers.append(job.status()["snapshot"])
            assert numbers[-1] > numbers[-2]
        check(out)
    read = max(number for _, number, _ in output(out))
    count = (read + 20) * KEYS
    with started(tallies.tallies(out, count), 1, snapshots=saved(tmp_path)) as job:
        ended(job)
        assert told(job, "running") == [f"running on 1 worker, from snapshot {numbers[-1]}"]
    check(out, count)
    last = store(tmp_path).latest()
    assert last is not None
    assert last.finished
    with (
        pytest.raises(FinishedError, match=rf"has finished, in snapshot {last.snapshot}"),
        started(tallies.tallies(out, count), snapshots=saved(tmp_path)),
    ):
        pass
    again = tmp_path / "again"
    fresh = saved(tmp_path, fresh=True)
    with started(tallies.tallies(again, 2_000, None), 1, snapshots=fresh) as job:
        ended(job)
        assert told(job, "running") == ["running on 1 worker"]
    check(again, 2_000)


def test_one_job_at_a_time_and_only_with_its_own_snapshots(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    with started(tallies.tallies(out), 1, snapshots=saved(tmp_path)) as job:
        committed(job)
        with (
            pytest.raises(LockedError, match=str(os.getpid())),
            started(tallies.tallies(out), snapshots=saved(tmp_path)),
        ):
            pass
        number = committed(job)
        assert job.stop(timeout=flows.DEADLINE)
    snapshots = tmp_path / "snapshots"
    shutil.copytree(snapshots / "tallies", snapshots / "others")
    with (
        pytest.raises(DoesNotFitError, match="is of flow 'tallies'"),
        started(tallies.tallies(other, name="others"), snapshots=saved(tmp_path)),
    ):
        pass
    # What is in another place is where a job of the same flow may begin; it never writes there.
    before = sorted(path.name for path in (snapshots / "tallies" / "manifests").iterdir())
    begin = Snapshots(str(tmp_path / "copy"), every=NEVER, begin=str(snapshots))
    with started(tallies.tallies(other), 2, snapshots=begin) as job:
        is_running(job)
        assert int(told(job, "running")[0].rpartition(" ")[2]) > number
        job.snapshot(timeout=flows.DEADLINE)
        assert "(full)" in told(job, "snapshot")[0]
        kill(job)
        recovered(job)
        job.snapshot(timeout=flows.DEADLINE)
    assert sorted(path.name for path in (snapshots / "tallies" / "manifests").iterdir()) == before


# ---------------------------------------------------------------- what a rescale hands over


def test_who_leaves_hands_over_output_and_deleted_keys(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(
        tallies.tallies(out), 3, snapshots=saved(tmp_path, NEVER), settings=PATIENT
    ) as job:
        is_running(job)
        first = job.snapshot(timeout=flows.DEADLINE)
        job.scale(1, wait=True, timeout=flows.DEADLINE)
        kill(job)  # what was handed over belongs to no snapshot yet
        recovered(job)
        assert told(job, "restarting")[0].endswith(f"snapshot {first}")
        job.scale(3, wait=True, timeout=flows.DEADLINE)
        job.scale(1, wait=True, timeout=flows.DEADLINE)
        second = job.snapshot(timeout=flows.DEADLINE)
        kill(job)  # now it does
        recovered(job, 2)
        assert told(job, "restarting")[1].endswith(f"snapshot {second}")
        drained(job, out)


# ---------------------------------------------------------------- what cannot be saved or loaded


def test_a_snapshot_that_cannot_be_saved_is_told_and_the_flow_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(tallies.tallies(out), snapshots=saved(tmp_path, NEVER)) as job:
        is_running(job)
        first = job.snapshot(timeout=flows.DEADLINE)
        home = tmp_path / "snapshots" / "tallies"
        for name in (
            "data",
            "manifests",
            "attempts",
        ):  # of workers, of the driver, before and after
            away = home / f"{name}.away"
            (home / name).rename(away)
            (home / name).write_text("not a directory")
            try:
                with pytest.raises(NotSavedError, match="is given up"):
                    job.snapshot(timeout=flows.DEADLINE)
            finally:
                (home / name).unlink()
                away.rename(home / name)
            assert job.status()["snapshot"] == first
        assert "worker" in told(job, "snapshot-failed")[0]
        number = job.snapshot(timeout=flows.DEADLINE)
        assert job.status()["failures"] == 0
        attempts = {attempt.snapshot: attempt for attempt in store(tmp_path).attempts()}
        assert attempts[number].state == "committed"
        assert attempts[first + 1].state == "failed"
        assert str(home / "data") in str(attempts[first + 1].error)
        kill(job)
        recovered(job)
        assert told(job, "restarting")[0].endswith(f"snapshot {number}")
        drained(job, out)


def test_a_worker_whose_files_may_not_grow_makes_the_snapshot_fail_and_not_the_flow(
    tmp_path: Path,
) -> None:
    flow = Flow("limited")
    records = flow.source(Generate(tallies.record, rate=4_000), name="records")
    counted = records.key_by(lambda item: item[0]).stateful_map(tally, initial=int, name="tally")
    counted.sink(Collect(), name="out")
    with started(flow, snapshots=saved(tmp_path, NEVER)) as job:
        flows.running(job, 500)
        job.snapshot(timeout=flows.DEADLINE)
        unlimited = resource.prlimit(pids(job)[0], resource.RLIMIT_FSIZE)
        resource.prlimit(pids(job)[0], resource.RLIMIT_FSIZE, (64, unlimited[1]))
        with pytest.raises(NotSavedError, match=r"worker 0: .*File too large"):
            job.snapshot(timeout=flows.DEADLINE)
        flows.more(job)
        resource.prlimit(pids(job)[0], resource.RLIMIT_FSIZE, unlimited)
        job.snapshot(timeout=flows.DEADLINE)
        kill(job, 1)
        recovered(job)
        flows.more(job)
        assert job.stop(drain=True, timeout=flows.DEADLINE)
        found = sorted(job.collected("out"))
        for key in range(KEYS):
            lines = [line for line in found if line[0] == key]
            assert lines == [[key, n, n % tallies.LIVES + 1] for n in range(len(lines))]


def test_what_is_damaged_is_named_and_an_older_snapshot_is_taken_only_if_asked_for(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with started(tallies.tallies(out), snapshots=saved(tmp_path)) as job:
        committed(job, 3)
        assert job.stop(timeout=flows.DEADLINE)
    newest, older, *_ = store(tmp_path).manifests()
    part = next(p for p in newest.parts if p.snapshot == newest.snapshot and p.step == "tally")
    home = tmp_path / "snapshots" / "tallies"
    manifest = home / "manifests" / f"{newest.snapshot:012d}.json"
    for path in (home / part.path, manifest):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with (
            pytest.raises(DamagedError, match=str(path)),
            started(tallies.tallies(out), snapshots=saved(tmp_path)),
        ):
            pass
        if path != manifest:
            path.write_bytes(whole)
    count = (max(number for _, number, _ in output(out)) + 20) * KEYS
    chosen = saved(tmp_path, allow_older=True)
    with started(tallies.tallies(out, count), 1, snapshots=chosen) as job:
        ended(job)
        assert told(job, "running") == [f"running on 1 worker, from snapshot {older.snapshot}"]
    found = set(map(tuple, output(out)))
    assert found == set(map(tuple, expected(count))), "some come twice then, but none is lost"


# ---------------------------------------------------------------- flows that change


def plus(seen: dict[str, int], item: tallies.Record) -> tuple[Any, tallies.Line]:
    """As `tally`, with another form of state."""
    seen["seen"] += 1
    line = [*item, seen["seen"]]
    return FORGET if seen["seen"] == tallies.LIVES else seen, line


def as_text(seen: int) -> str:
    return str(seen)


def as_dict(seen: str) -> dict[str, int]:
    return {"seen": int(seen)}


def broken(seen: int) -> dict[str, int]:
    raise ValueError(f"what is {seen}?")


def changed(out: Path, **options: Any) -> Flow:
    flow = Flow("tallies")
    source = Generate(tallies.record, rate=4_000, partitions=tallies.PARTS)
    lines = flow.source(source, name="records").key_by(lambda item: item[0])
    initial: Any = lambda: {"seen": 0}  # noqa: E731
    lines.stateful_map(plus, initial=initial, name="totals", **options).sink(
        Files(out), name="files"
    )
    return flow


def test_steps_are_renamed_upgraded_and_dropped_by_name_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flow = tallies.tallies(out)
    lines = flow.source(Generate(tallies.record, rate=100), name="more")
    lines.key_by(lambda item: item[0]).reduce(max, name="largest").sink(Collect(), name="shown")
    with started(flow, snapshots=saved(tmp_path)) as job:
        committed(job, 2)
        assert job.stop(timeout=flows.DEADLINE)
    for text in (
        r"'tally' has state.*rename=\{'tally': NAME\}.*drop=\{'tally'\}",
        r"'more'.*'largest'.*'shown'",
    ):
        with (
            pytest.raises(DoesNotFitError, match=f"(?s){text}"),
            started(changed(out), snapshots=saved(tmp_path)),
        ):
            pass
    rename, drop = {"tally": "totals", "out": "files"}, frozenset(["more", "largest", "shown"])
    upgraded = (
        r"(?s)step 'totals': broken, one of its upgrades, raised for the saved state \d+ of key"
    )
    with (
        started(
            changed(out, upgrades=[broken]), snapshots=saved(tmp_path, rename=rename, drop=drop)
        ) as job,
        pytest.raises(FlowFailedError, match=upgraded),
    ):
        job.wait(flows.DEADLINE)
    newer = changed(out, upgrades=[as_text, as_dict])
    with started(newer, 3, snapshots=saved(tmp_path, rename=rename, drop=drop)) as job:
        committed(job)
        kill(job)  # the files of the snapshot still have the old names in them
        recovered(job)
        drained(job, out)


# ---------------------------------------------------------------- how much is saved, and kept


def test_only_changed_keys_are_saved_until_a_full_one_pays_and_few_are_kept(tmp_path: Path) -> None:
    lines, out = tmp_path / "lines", tmp_path / "out"
    lines.touch()
    fed = [0] * KEYS
    flow = Flow("tallies")
    counted = flow.source(Tail(lines), name="records").key_by(lambda item: item[0], name="keys")
    counted.stateful_map(tally, initial=int, name="tally").sink(Files(out), name="out")

    with started(flow, snapshots=saved(tmp_path, NEVER)) as job:

        def feed(keys: range, wait: bool = True) -> None:
            with lines.open("a") as file:
                for key in keys:
                    file.write(f"[{key},{fed[key]}]\n")
                    fed[key] += 1

            def read() -> int:
                workers = job.status()["workers"]
                return sum(w["stages"]["keys"]["records"] for w in workers if w.get("stages"))

            eventually(lambda: not wait or read() == sum(fed), "all is read")

        def rows() -> tuple[bool, int]:
            """Whether it was full, and how many keys it has saved."""
            found = store(tmp_path).get(job.snapshot(timeout=flows.DEADLINE))
            now = [part for part in found.parts if part.snapshot == found.snapshot]
            return found.full, sum(part.rows for part in now if part.step == "tally")

        is_running(job)
        feed(range(KEYS))
        assert rows() == (True, KEYS)
        feed(range(5))
        assert rows() == (False, 5)
        job.scale(3, wait=True, timeout=flows.DEADLINE)
        feed(range(3, 8))
        assert rows() == (False, 5), "what only moved is not saved again"
        assert rows() == (False, 0)
        fulls = []
        for _ in range(3):
            feed(range(60))
            fulls.append(rows())
        assert (True, KEYS) in fulls, "when what was added is more than what there is"
        for _ in range(2):
            feed(range(10))
            rows()
        home = tmp_path / "snapshots" / "tallies"
        kept = sorted(path.stem for path in (home / "manifests").iterdir())
        assert len(kept) == 3
        named = {part.path for found in store(tmp_path).manifests() for part in found.parts}
        there = {str(p.relative_to(home)) for p in (home / "data").rglob("*.parquet")}
        assert there == named, "files that no snapshot needs are gone"
        kill(job)
        recovered(job)
        feed(range(KEYS), wait=False)
        with lines.open("a") as file:
            file.write("end\n")
        ended(job)
    want = sorted([k, n, n % tallies.LIVES + 1] for k in range(KEYS) for n in range(fed[k]))
    assert output(out) == want
