"""What happens to a flow when something goes wrong, on real processes."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
from tests.engine.controller import flows
from tests.engine.controller.flows import counting, eventually, more, pids, running, started

from railgun import Collect, Flow, FlowFailedError, Items, Settings, StepError
from railgun.engine.controller.controller import WorkersError
from railgun.flows.errors import FlowError
from railgun.flows.shipping import FlowNotPicklableError
from railgun.job import JobError, NotRescaledError, run
from railgun.testing.local_workers import SubprocessLauncher
from railgun.transport.hello import MAGIC

# ---------------------------------------------------------------- workers that are lost


def test_a_worker_that_is_killed_is_replaced_and_the_result_is_right() -> None:
    with started(counting("killed")) as job:
        running(job, records=500)
        os.kill(pids(job)[1], signal.SIGKILL)
        eventually(lambda: "restarting" in flows.kinds(job), "it says so")
        told = next(event.text for event in job.events() if event.kind == "restarting")
        assert "worker 1 is lost" in told
        assert "from its sources" in told
        running(job, records=500)
        assert job.status()["failures"] == 1
        assert job.stop(timeout=flows.DEADLINE)
        assert flows.check_whole(job) >= 500


def test_workers_that_are_killed_together_are_one_failure_and_all_are_replaced() -> None:
    with started(counting("killed-together"), 3, settings=Settings(restarts=1)) as job:
        running(job, records=500)
        for pid in pids(job):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: flows.kinds(job).count("running") == 2, "it runs again")
        running(job, records=100)
        assert flows.kinds(job).count("restarting") == 1
        assert job.status()["failures"] == 1
        assert job.stop(timeout=flows.DEADLINE)
        flows.check_whole(job)


def test_a_worker_that_is_killed_during_a_rescale() -> None:
    with started(counting("killed-moving")) as job:
        running(job)
        job.scale(4)
        eventually(lambda: "rescaling" in flows.kinds(job), "the rescale begins")
        os.kill(pids(job)[0], signal.SIGKILL)
        eventually(lambda: job.status()["failures"], "it is noticed")
        eventually(lambda: job.status()["state"] == "running", "it runs again")
        assert job.status()["size"] == 4
        running(job, records=500)
        assert job.stop(timeout=flows.DEADLINE)
        flows.check_whole(job)


def hang_once(path: str, item: flows.Record) -> flows.Record:
    """Sleeps for ever, the first time anyone comes here."""
    if item[1] == 3:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return item
        while True:
            time.sleep(1)
    return item


def test_a_worker_that_hangs_is_killed_and_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "hung")
    flow = Flow("hangs")
    records = flow.source(Items([(k, n) for n in range(20) for k in range(50)]), name="records")
    records.map(lambda item: hang_once(path, item)).key_by(lambda item: item[0]).sink(
        Collect(), name="out"
    )
    settings = Settings(hang_after=2.0)
    by_value = [sys.modules[__name__], flows]
    with started(flow, settings=settings, by_value=by_value) as job:
        assert job.wait(flows.DEADLINE)
        told = [event.text for event in job.events() if event.kind == "restarting"]
        assert len(told) == 1
        assert "no sign of life" in told[0]
        assert sorted(job.collected("out")) == sorted((k, n) for n in range(20) for k in range(50))


def slowly(item: int) -> int:
    time.sleep(0.02)
    return item


def test_a_worker_that_is_slow_does_not_hang() -> None:
    flow = Flow("slow")
    flow.source(Items(range(200)), name="numbers").map(slowly).sink(Collect(), name="out")
    settings = Settings(hang_after=2.0, restarts=0)
    with started(flow, 1, settings=settings, by_value=[sys.modules[__name__]]) as job:
        assert job.wait(flows.DEADLINE)
        assert sorted(job.collected("out")) == list(range(200))
        assert job.status()["failures"] == 0


SLOW_MODULE = "railgun_test_slow_module"


def import_slowly(path: str) -> None:
    if path not in sys.path:
        sys.path.insert(0, path)
    importlib.import_module(SLOW_MODULE)


class LoadedSlowly:
    """A function whose unpickling takes its time."""

    def __init__(self, how: str, path: str) -> None:
        self.how = how
        self.path = path

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        if self.how == "import":
            import_slowly(self.path)
        else:
            time.sleep(SLOW_S)

    def __call__(self, item: int) -> int:
        return item


SLOW_S = 8.0


@pytest.mark.slow
@pytest.mark.parametrize("when", ["first use", "import", "unpickling"])
def test_a_slow_import_or_flow_is_no_hang(when: str, tmp_path: Path) -> None:
    (tmp_path / f"{SLOW_MODULE}.py").write_text(f"import time\ntime.sleep({SLOW_S})\n")
    path = str(tmp_path)

    def first_use(item: int) -> int:
        import_slowly(path)
        return item

    flow = Flow("imports")
    step = first_use if when == "first use" else LoadedSlowly(when, path)
    flow.source(Items(range(10)), name="numbers").map(step).sink(Collect(), name="out")
    settings = Settings(hang_after=3.0, restarts=0)
    with started(flow, 1, settings=settings, by_value=[sys.modules[__name__]]) as job:
        assert job.wait(flows.DEADLINE)
        assert job.collected("out") == list(range(10))


def exit_now(item: object) -> object:
    os._exit(3)


def test_failures_that_come_again_and_again_fail_the_job_with_the_cause() -> None:
    flow = Flow("dies")
    flow.source(Items(range(10)), name="numbers").map(exit_now).sink(Collect(), name="out")
    settings = Settings(restarts=2)
    with started(flow, 1, settings=settings, by_value=[sys.modules[__name__]]) as job:
        with pytest.raises(FlowFailedError, match=r"worker 0 is lost.*failure 3 within"):
            job.wait(flows.DEADLINE)
        assert flows.kinds(job).count("restarting") == 2
        assert job.status()["state"] == "failed"


class Refuses(SubprocessLauncher):
    """A cluster that has room for two workers."""

    def launch(self, spec, ended) -> None:  # type: ignore[no-untyped-def]
        if spec.worker > 1:
            raise OSError("no room")
        super().launch(spec, ended)


def test_a_rescale_for_which_no_worker_can_be_launched_leaves_the_flow_as_it_is() -> None:
    flow = counting("no-room")
    with run(flow, 2, launcher=Refuses(), http=False, by_value=[flows]) as job:
        running(job)
        with pytest.raises(NotRescaledError, match=r"worker 2 is lost.*no room"):
            job.scale(3, wait=True, timeout=flows.DEADLINE)
        more(job)
        assert job.status()["failures"] == 0
        assert job.status()["size"] == 2


# ---------------------------------------------------------------- the user's code


def fails_at_seven(number: int) -> int:
    if number == 7:
        raise LookupError(f"no such number: {number}")
    return number


def test_a_function_that_raises_stops_the_flow_with_record_step_and_traceback() -> None:
    flow = Flow("raises")
    flow.source(Items(range(10)), name="numbers").map(fails_at_seven, name="look up").sink(
        Collect(), name="out"
    )
    with started(flow, by_value=[sys.modules[__name__]]) as job:
        with pytest.raises(FlowFailedError) as caught:
            job.wait(flows.DEADLINE)
        told = str(caught.value)
        assert "step 'look up': fails_at_seven raised for the record 7" in told
        assert "LookupError: no such number: 7" in told
        assert "in fails_at_seven" in told
        assert "dead_letter" in told
        assert flows.kinds(job)[-1] == "failed"
        assert "restarting" not in flows.kinds(job)
    assert issubclass(StepError, Exception)


def test_a_module_the_workers_lack_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def same(item):\n    return item\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    flow = Flow("lacks")
    flow.source(Items(range(3)), name="numbers").map(only_here.same).sink(Collect(), name="out")
    for workers in (1, 2):
        with (
            started(flow, workers, by_value=()) as job,
            pytest.raises(FlowFailedError, match="needs the module 'only_here'"),
        ):
            job.wait(flows.DEADLINE)
    with started(flow, by_value=[only_here]) as job:
        assert job.wait(flows.DEADLINE)
        assert sorted(job.collected("out")) == [0, 1, 2]


def test_a_flow_that_cannot_be_pickled_names_step_and_variable() -> None:
    lock = threading.Lock()
    flow = Flow("locked")
    flow.source(Items(range(3)), name="numbers").map(
        lambda n: (lock.locked(), n), name="look at it"
    ).sink(Collect(), name="out")
    with pytest.raises(FlowNotPicklableError) as caught:
        run(flow, launcher=SubprocessLauncher(), http=False)
    told = str(caught.value)
    assert "test_failures.py:" in told
    assert "step 'look at it'" in told
    assert "variable 'lock'" in told


def test_what_makes_no_sense_is_refused_before_anything_starts() -> None:
    class Never(SubprocessLauncher):
        def launch(self, spec, ended) -> None:  # type: ignore[no-untyped-def]
            raise AssertionError

    flow = counting("refused")
    for workers in (0, -1, True, 2.0, "2", 1025):
        with pytest.raises(WorkersError):
            run(flow, workers, launcher=Never())  # type: ignore[arg-type]
    with pytest.raises(JobError, match="needs a Flow"):
        run("flow", launcher=Never())  # type: ignore[arg-type]
    with pytest.raises(JobError, match="name"):
        run(flow, launcher=Never(), name="../up")
    with pytest.raises(JobError, match="one of them"):
        run(flow, launcher=Never(), master="local")
    with pytest.raises(JobError, match="token"):
        run(flow, launcher=Never(), token="short")
    open_end = Flow("open-end")
    open_end.source(Items([1]), name="numbers")
    with pytest.raises(FlowError, match="leads nowhere"):
        run(open_end, launcher=Never())


# ---------------------------------------------------------------- strangers


def ports_of(pid: int) -> list[int]:
    """The TCP ports a process listens at."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            found.append(int(fields[1].split(":")[1], 16))
    return found


GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x80\x05cos\nsystem\n",
    MAGIC + b"x" * 32 + b"\x02\x00{}" + b"y" * 32,  # no secret
    MAGIC + b"x" * 32 + b"\xff\xff" + b"z" * 100,  # too long
    MAGIC[:3],
)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks at /proc")
def test_strangers_are_turned_away_and_the_flow_goes_on() -> None:
    with started(counting("strangers"), http=True, registry=None) as job:
        status = running(job)
        ports = [job._controller._port]
        for pid in pids(job):
            ports += ports_of(pid)
        assert len(ports) == 3
        for port in ports:
            for data in GARBAGE:
                with socket.create_connection(("127.0.0.1", port), 10) as stranger:
                    stranger.sendall(data)
                    stranger.shutdown(socket.SHUT_WR)
                    answer = b""
                    while piece := stranger.recv(4096):
                        answer += piece
                    assert b"Traceback" not in answer
        more(job)
        now = job.status()
        assert now["generation"] == status["generation"]
        assert now["failures"] == 0


# ---------------------------------------------------------------- nothing is left


@pytest.mark.parametrize("end", ["stop", "abort", "close"])
def test_no_process_is_left(end: str) -> None:
    with started(counting(f"left-{end}"), 3) as job:
        running(job)
        processes = pids(job)
        assert len(processes) == 3
        if end == "stop":
            assert job.stop(timeout=flows.DEADLINE)
        elif end == "abort":
            job.abort()
            with pytest.raises(FlowFailedError, match="aborted"):
                job.wait(flows.DEADLINE)
        else:
            job.close()
        assert not any(map(flows.is_alive, processes))
        job.close()  # may be called again


DRIVER = """
import sys, time
from railgun import Collect, Flow, Items, run
from railgun.testing.local_workers import SubprocessLauncher

def stuck(item):
    if item == "stuck":
        time.sleep(10_000)
    return item

flow = Flow("driver")
items = flow.source(Items(["free", "stuck"] if sys.argv[1] == "stuck" else ["free"] * 10**6, partitions=2))
items.key_by(str).map(stuck).sink(Collect(), name="out")
job = run(flow, 2, launcher=SubprocessLauncher(), http=False)
while job.status()["state"] != "running":
    time.sleep(0.01)
print(*[worker["pid"] for worker in job.status()["workers"]], flush=True)
if sys.argv[1] == "exits":
    sys.exit(0)
time.sleep(10_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stuck", "exits"])
def test_no_process_is_left_when_the_program_is_killed_or_just_ends(
    how: str, tmp_path: Path
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    with subprocess.Popen(
        [sys.executable, script, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        assert driver.stdout is not None
        processes = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(processes) == 2
        if how == "exits":
            assert driver.wait(flows.DEADLINE) == 0
        else:
            driver.kill()
    eventually(lambda: not any(map(flows.is_alive, processes)), "they end")


def test_modules_are_shipped_for_one_job_only() -> None:
    import cloudpickle  # type: ignore[import-untyped]

    from railgun.flows.shipping import ship

    flow = counting("once")
    module: ModuleType = flows
    ship(flow, flow.plan(), [module])
    assert module.__name__ not in cloudpickle.list_registry_pickle_by_value()
