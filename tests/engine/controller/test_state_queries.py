"""Asking for state while a flow runs, by program and by HTTP; snapshots by HTTP. Nothing that is asked does harm."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.controller import flows
from tests.engine.controller.flows import counting, eventually, more, running, started
from tests.engine.controller.test_http import SAMPLE, Http

from railgun import Collect, Flow, Generate, Job, Snapshots
from railgun.engine.controller import state_queries as inquiries
from railgun.engine.controller.state_queries import NoAnswerError, NoKeyError, NoStepError
from railgun.engine.protocol.lifecycle.machine import LifecycleError
from railgun.errors import KeyTypeError
from railgun.hashing import key_hash
from railgun.job import NotSavedError


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inquiries")


@pytest.fixture(scope="module")
def job(place: Path) -> Iterator[Job]:
    chosen = Snapshots(str(place / "snapshots"), every=3600)
    with started(counting("asked"), http=True, registry=place, snapshots=chosen) as job:
        running(job, flows.KEYS)
        yield job


@pytest.fixture
def api(job: Job, place: Path) -> Http:
    return Http(job, place)


def test_the_state_of_a_key_is_told(job: Job) -> None:
    before = job.state("order", 7)
    more(job, 3 * flows.KEYS)
    assert job.state("order", 7) > before >= 0
    assert job.state("order", 7.0) >= before, "equal keys are one"
    position, finished, _ = job.state("records", 0)
    assert position[0] > 0
    assert not finished


def test_what_is_not_there_is_told(job: Job) -> None:
    with pytest.raises(NoKeyError, match="step 'order' has no state of the key 'nobody'"):
        job.state("order", "nobody")
    with pytest.raises(NoStepError, match=r"no step 'x' with state; .*: 'records', 'order'$"):
        job.state("x", 7)
    with pytest.raises(KeyTypeError):
        job.state("order", [7])


def test_a_key_is_found_wherever_it_is_while_keys_move(job: Job) -> None:
    over = threading.Event()
    wrong: list[BaseException] = []
    last = dict.fromkeys(range(flows.KEYS), -1)

    def look() -> None:
        try:
            while not over.is_set():
                for key in last:
                    state = job.state("order", key)
                    assert state >= last[key], f"key {key} went back from {last[key]} to {state}"
                    last[key] = state
        except BaseException as error:
            wrong.append(error)

    looking = threading.Thread(target=look)
    looking.start()
    for workers in (4, 1, 3, 2):
        job.scale(workers, wait=True, timeout=flows.DEADLINE)
        began = time.monotonic()
        with pytest.raises(NoKeyError):
            job.state("order", "nobody")
        assert time.monotonic() - began < inquiries.ANSWER_TIMEOUT_S
    over.set()
    looking.join()
    assert wrong == []
    assert min(last.values()) >= 0
    assert job.status()["failures"] == 0


def test_state_by_http(job: Job, api: Http) -> None:
    status, told = api.ask("GET", "/state?step=order&key=7")
    assert status == 200
    assert (told["step"], told["key"], told["ended"], told["timers"]) == ("order", 7, False, [])
    assert told["state"] >= 0
    assert told["worker"] in (0, 1)
    status, told = api.ask("GET", "/state?step=order")
    assert (status, told["keys"]) == (200, flows.KEYS)
    assert sum(one["keys"] for one in told["workers"]) == flows.KEYS
    assert set(told["workers"][0]["samples"]) <= set(range(flows.KEYS))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "/state", None, 400, "bad-request"),
        ("GET", "/state?step=", None, 404, "no-step"),
        ("GET", "/state?step=nope&key=1", None, 404, "no-step"),
        ("GET", "/state?step=out", None, 404, "no-step"),
        ("GET", "/state?step=order&key=nobody", None, 404, "no-key"),
        ("GET", "/state?step=order&key=%227%22", None, 404, "no-key"),
        ("GET", "/state?step=order&key=", None, 404, "no-key"),
        ("GET", "/state?step=order&key=NaN", None, 400, "bad-request"),
        ("GET", "/state?step=order&key=null", None, 404, "no-key"),
        ("GET", "/state?step=order&key=%5B%22a%22,1%5D", None, 404, "no-key"),
        ("GET", "/state?step=order&key=%22%5Cud800%22", None, 404, "no-key"),
        ("GET", "/state?step=order&key=%FF%00", None, 404, "no-key"),
        ("GET", "/state?step=order&key=" + "9" * 5000, None, 404, "no-key"),
        ("GET", "/state?step=order&key=" + "[" * 5000, None, 400, "bad-request"),
        ("GET", "/state?step=order&key=%7B%22a%22:1%7D", None, 400, "bad-request"),
        ("POST", "/state?step=order&key=7", b"", 405, "method"),
        ("GET", "/snapshot", None, 405, "method"),
        ("POST", "/stop", b'{"drain": 1}', 400, "bad-request"),
        ("POST", "/stop", b"[]", 400, "bad-request"),
        ("POST", "/stop", b"{", 400, "bad-json"),
    ],
)
def test_what_a_client_gets_wrong_harms_nobody(
    job: Job, api: Http, method: str, path: str, body: bytes | None, status: int, kind: str
) -> None:
    got, answer = api.ask(method, path, raw=body)
    assert (got, answer["error"]["kind"]) == (status, kind)
    assert answer["error"]["message"]
    assert api.ask("GET", "/state?step=order&key=7")[0] == 200
    assert (job.status()["state"], job.status()["failures"]) == ("running", 0)


def test_the_number_of_questions_at_once_is_bounded(
    api: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiries, "MAX_QUERIES", 0)
    status, answer = api.ask("GET", "/state?step=order&key=7")
    assert (status, answer["error"]["kind"]) == (503, "busy")


def test_a_snapshot_by_http_and_its_figures(job: Job, api: Http) -> None:
    status, answer = api.ask("POST", "/snapshot")
    assert status == 202
    number = answer["after"] + 1
    eventually(lambda: job.status()["snapshot"] == number, "it is committed")
    [event] = [e for e in job.events(answer["last_event"]) if e.kind == "snapshot"]
    assert event.data["snapshot"] == number
    assert event.data["rows"] == flows.KEYS + 1
    assert event.data["phases"].keys() == {"align", "cut", "encode", "write"}

    def record() -> Any:
        one = api.ask("GET", "/snapshots")[1]["snapshots"][0]
        return one if one["state"] == "committed" else None

    one = eventually(record, "its record is written")
    assert (one["snapshot"], one["why"], one["kept"]) == (number, "asked for", True)
    text = api.ask("GET", "/metrics")[1]
    found = [SAMPLE.match(line) for line in text.splitlines() if not line.startswith("#")]
    values = {match[1]: float(match[3]) for match in found if match and "snapshot" in match[1]}
    assert values["railgun_snapshots_total"] >= 1
    assert values["railgun_snapshot_failures_total"] == 0
    assert 0 <= values["railgun_snapshot_age_seconds"] < flows.DEADLINE
    assert values["railgun_snapshot_duration_seconds"] == event.data["seconds"]
    assert values["railgun_snapshot_written_bytes"] == event.data["size"]
    assert values["railgun_snapshot_bytes"] >= event.data["size"]


def test_a_worker_that_does_not_answer_holds_up_its_question_only(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiries, "ANSWER_TIMEOUT_S", 0.3)
    key = 7
    owner = job._controller.lifecycle.placement.owner(key_hash(key))
    pid = next(w["pid"] for w in job.status()["workers"] if w["worker"] == owner)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(NoAnswerError, match=f"worker {owner} has not answered"):
            job.state("order", key)
        assert job.status()["state"] == "running"
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: job.state("order", key) >= 0, "it answers again")


# ---------------------------------------------------------------- states that resist


class Nasty:
    """Raises whatever is done to it, and what nobody expects."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __repr__(self) -> str:
        raise self.error("no")

    def __reduce__(self) -> Any:
        raise self.error("no")


def kept(n: int) -> Any:
    return {1: [1, (2, 3)], 2: {1, 2}, 3: Nasty(ValueError), 4: Nasty(SystemExit)}.get(n)


def test_states_that_resist_are_told_and_the_worker_goes_on() -> None:
    flow = Flow("nasty")
    numbers = flow.source(Generate(lambda index, random: index % 5 + 1, rate=500), name="numbers")
    numbers.key_by(lambda n: n).stateful_map(
        lambda state, n: (kept(n), n), initial=lambda: None, name="keep"
    ).sink(Collect(), name="out")
    with started(flow, 1, by_value=[flows, sys.modules[__name__]]) as job:
        running(job, 10)
        assert job.state("keep", 1) == [1, (2, 3)]
        assert job.state("keep", 2) == {1, 2}
        assert job.state("keep", 5) is None
        for key in (3, 4):
            with pytest.raises(NoAnswerError, match=r"worker 0 cannot answer: .*no"):
                job.state("keep", key)
        with pytest.raises(NoKeyError):
            job.state("keep", 6)
        more(job, 10)
        assert job.status()["failures"] == 0


# ---------------------------------------------------------------- the end


def test_a_flow_that_has_ended_has_no_state(tmp_path: Path) -> None:
    flow = counting("over", rate=None, count=1000)
    with started(flow, snapshots=str(tmp_path)) as job:
        assert job.wait(flows.DEADLINE)
        with pytest.raises(LifecycleError, match=r"finished.*in snapshot 1"):
            job.state("order", 7)
        with pytest.raises(LifecycleError, match="nothing to save"):
            job.snapshot()
    with pytest.raises(LifecycleError, match="finished"):
        job.state("order", 7)


def test_without_snapshots_none_can_be_taken_or_listed() -> None:
    with started(counting("none")) as job:
        running(job)
        for ask in (job.snapshot, job.snapshots):
            with pytest.raises(LifecycleError, match="takes no snapshots"):
                ask()
        assert job.status()["snapshots"] is None


def test_a_snapshot_that_cannot_be_saved_is_told_and_the_flow_goes_on(tmp_path: Path) -> None:
    with started(counting("full"), snapshots=Snapshots(str(tmp_path), every=3600)) as job:
        running(job)
        assert job.snapshot(timeout=flows.DEADLINE) == 1
        data = tmp_path / "full" / "data"
        data.rename(tmp_path / "full" / "elsewhere")
        data.write_text("no directory")
        with pytest.raises(NotSavedError, match=r"snapshot 2 is given up: .*data"):
            job.snapshot(timeout=flows.DEADLINE)
        told = job.status()["snapshots"]
        assert (told["failures"], told["last_failure"]["snapshot"]) == (1, 2)
        assert "data" in told["last_failure"]["why"]
        data.unlink()
        (tmp_path / "full" / "elsewhere").rename(data)
        assert job.snapshot(timeout=flows.DEADLINE) == 3
        states = {one["snapshot"]: one["state"] for one in job.snapshots()}
        assert states[2] == "failed"


@pytest.mark.slow
def test_a_snapshot_that_a_lost_worker_ends_is_told_as_failed(tmp_path: Path) -> None:
    with started(counting("lost"), snapshots=Snapshots(str(tmp_path), every=3600)) as job:
        running(job)
        first, second = flows.pids(job)
        os.kill(first, signal.SIGSTOP)  # so that the snapshot cannot be whole
        failed: list[str] = []

        def take() -> None:
            try:
                job.snapshot(timeout=flows.DEADLINE)
            except NotSavedError as error:
                failed.append(str(error))

        taking = threading.Thread(target=take)
        taking.start()
        eventually(lambda: job.status()["saving"] == "saving", "it is under way")
        assert job.status()["snapshots"]["under_way"]["phase"] == "saving"
        os.kill(second, signal.SIGKILL)
        os.kill(first, signal.SIGCONT)
        taking.join()
        assert "snapshot 1 is given up: worker" in failed[0]
        running(job)
        assert job.snapshot(timeout=flows.DEADLINE) == 2
