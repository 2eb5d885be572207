"""The HTTP API of a running job, and what clients get wrong."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.engine.controller import flows
from tests.engine.controller.flows import counting, eventually, more, running, started

from railgun import Job
from railgun.engine.controller.controller import ListenError
from railgun.engine.controller.metrics import STATES, Totals, prometheus
from railgun.transport.registry import Registry


class Http:
    """A client that can misbehave."""

    def __init__(self, job: Job, registry: Path) -> None:
        entry = Registry(registry).find(job.name)
        assert entry is not None
        self.token = entry.token
        self.host = urlsplit(entry.url).netloc

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.host, timeout=30)
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.token}"} if headers is None else headers
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        told = response.read()
        connection.close()
        is_json = response.headers["Content-Type"].startswith("application/json")
        return response.status, json.loads(told) if is_json else told.decode()

    def open(self, path: str, **headers: str) -> socket.socket:
        host, port = self.host.split(":")
        opened = socket.create_connection((host, int(port)), 30)
        lines = [f"GET {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {self.token}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        opened.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return opened


def told(stream: socket.socket) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Server-sent events: kind, data, id."""
    fields: dict[str, str] = {}
    with stream.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            name, colon, value = line.rstrip("\r\n").partition(": ")
            if colon and name in ("event", "data", "id"):
                fields[name] = value
            elif not name and "event" in fields:
                yield fields["event"], json.loads(fields["data"]), fields.get("id", "")
                fields = {}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs") / "jobs"


@pytest.fixture(scope="module")
def job(registry: Path) -> Iterator[Job]:
    with started(counting("served"), http=True, registry=registry) as job:
        running(job)
        yield job


@pytest.fixture
def api(job: Job, registry: Path) -> Http:
    return Http(job, registry)


def test_it_rescales_by_http_while_records_flow(job: Job, api: Http) -> None:
    for workers in (4, 1, 2):
        status, answer = api.ask("POST", "/scale", {"workers": workers})
        assert status == 202
        after = answer["last_event"]
        with api.open(f"/events?after={after}") as stream:
            for kind, data, number in told(stream):
                if kind == "happened":
                    assert int(number) > after
                    assert data["kind"] in ("rescaling", "rescaled")
                    if data["kind"] == "rescaled":
                        assert data["data"]["moved"] > 0
                        assert data["data"]["bytes"] > 0
                        break
        assert api.ask("GET", "/status")[1]["size"] == workers
        more(job)
    assert job.status()["failures"] == 0


def test_a_key_is_pinned(job: Job, api: Http) -> None:
    status, answer = api.ask("POST", "/pin", {"key": 7, "worker": 1})
    assert status == 202
    assert list(answer["status"]["pinned"].values()) == [1]
    eventually(lambda: job.status()["state"] == "running", "it has moved")
    assert api.ask("POST", "/pin", {"key": ["a", 1], "worker": 0})[0] == 202
    eventually(lambda: job.status()["state"] == "running", "it has moved")


def test_who_has_no_token_gets_nothing(api: Http) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {api.token}"},
        {"Authorization": api.token},
        {"Authorization": "Bearer " + "ü" * 10},
    ):
        for method, path in (("GET", "/status"), ("POST", "/abort"), ("GET", "/nowhere")):
            encoded = {k: v.encode("utf-8").decode("latin-1") for k, v in headers.items()}
            status, answer = api.ask(method, path, headers=encoded)
            assert status == 401
            assert answer["error"]["kind"] == "unauthorized"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/scale", b"{", 400, "bad-json"),
        ("POST", "/scale", b"\xff\xfe", 400, "bad-json"),
        ("POST", "/scale", b"[" * 30_000, 400, "bad-json"),
        ("POST", "/scale", b"", 400, "bad-json"),
        ("POST", "/scale", b"[4]", 400, "bad-request"),
        ("POST", "/scale", b"{}", 400, "bad-request"),
        ("POST", "/scale", b'{"workers": 0}', 400, "bad-request"),
        ("POST", "/scale", b'{"workers": -3}', 400, "bad-request"),
        ("POST", "/scale", b'{"workers": true}', 400, "bad-request"),
        ("POST", "/scale", b'{"workers": 2.5}', 400, "bad-request"),
        ("POST", "/scale", b'{"workers": "4"}', 400, "bad-request"),
        ("POST", "/scale", b'{"workers": 1000000000000}', 400, "bad-request"),
        ("POST", "/pin", b'{"key": "a"}', 400, "bad-request"),
        ("POST", "/pin", b'{"key": "a", "worker": 99}', 400, "bad-request"),
        ("POST", "/pin", b'{"key": "a", "worker": "0"}', 400, "bad-request"),
        ("POST", "/pin", b'{"key": {"a": 1}, "worker": 0}', 400, "bad-request"),
        ("POST", "/scale", b" " * 100_000, 413, "too-large"),
        ("GET", "/scale", None, 405, "method"),
        ("POST", "/status", b"", 405, "method"),
        ("GET", "/", None, 404, "not-found"),
        ("GET", "/events?after=x", None, 400, "bad-request"),
        ("GET", "/events?after=" + "9" * 4000, None, 400, "bad-request"),
    ],
)
def test_what_a_client_gets_wrong_is_told(
    job: Job, api: Http, method: str, path: str, body: bytes | None, status: int, kind: str
) -> None:
    got, answer = api.ask(method, path, raw=body)
    assert (got, answer["error"]["kind"]) == (status, kind)
    assert answer["error"]["message"]
    assert job.status()["failures"] == 0


def test_garbage_ends_its_connection_and_nothing_else(job: Job, api: Http) -> None:
    host, port = api.host.split(":")
    for data in (b"\x16\x03\x01\x02\x00", b"GET /" + b"a" * 100_000, b"\0" * 1000):
        with socket.create_connection((host, int(port)), 30) as stranger:
            try:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
            except ConnectionError:
                pass
    more(job)
    assert api.ask("GET", "/health") == (200, {"state": "running"})


def test_events_begin_after_the_one_that_is_named(job: Job, api: Http) -> None:
    job.scale(job.status()["size"], wait=True)
    with api.open("/events", Last_Event_ID="1") as stream:
        kind, data, number = next(told(stream))
        assert (kind, number) == ("happened", "2")
        assert data["kind"] == "rescaling"
    with api.open(f"/events?after={job.events()[-1].number}") as stream:
        events = told(stream)
        for _ in range(3):
            kind, data, _ = next(events)
            assert kind == "status"
            assert data["name"] == "served"


def test_who_listens_and_does_not_read_holds_up_nobody(
    job: Job, api: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    from railgun.engine.controller import http as served

    monkeypatch.setattr(served, "WRITE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(served, "STATUS_EVERY_S", 0.0005)
    listeners = job._api._listeners  # type: ignore[union-attr]
    with api.open("/events"):
        eventually(lambda: listeners, "it listens")
        more(job)
        eventually(lambda: not listeners, "it is dropped")
    more(job)


def test_the_number_of_listeners_is_bounded(
    job: Job, api: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    from railgun.engine.controller import http as served

    monkeypatch.setattr(served, "MAX_LISTENERS", 1)
    with api.open("/events") as stream:
        next(told(stream))
        assert api.ask("GET", "/events")[1]["error"]["kind"] == "busy"
    listeners = job._api._listeners  # type: ignore[union-attr]
    eventually(lambda: not listeners, "it is noticed that nobody listens")


SAMPLE = re.compile(r'^(railgun_\w+)\{((?:\w+="(?:[^"\\\n]|\\.)*",?)*)\} (-?[\d.e+-]+)$')


def test_metrics_are_what_prometheus_reads(job: Job, api: Http) -> None:
    here = 'flow="served",worker="0",stage="keys"'
    for sample in (
        f"railgun_records_total{{{here}}} [1-9]",
        'railgun_unsent_bytes{flow="served",worker="0"}',
    ):
        eventually(lambda s=sample: re.search(s, api.ask("GET", "/metrics")[1]))  # type: ignore[misc]
    status, text = api.ask("GET", "/metrics")
    assert status == 200
    names, samples = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in names
            names[name] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.match(line)
            assert found, line
            assert found[1] in names
            samples[found[1], found[2]] = float(found[3])
    for name, kind in names.items():
        assert name.endswith("_total") == (kind == "counter"), name
    assert samples["railgun_state", 'flow="served",state="running"'] == 1
    assert sum(v for (n, _), v in samples.items() if n == "railgun_state") == 1
    assert samples["railgun_workers", 'flow="served",state="running"'] == 2
    for name in ("records_total", "keys", "moved_keys_total", "moved_bytes_total",
                 "taken_keys_total", "held_records", "longest_hold_seconds", "moving_keys"):  # fmt: skip
        assert ("railgun_" + name, here) in samples, name
    assert samples["railgun_records_total", here] > 0
    for name in ("unsent_bytes", "resting", "dead_letters_total"):
        assert (f"railgun_{name}", 'flow="served",worker="0"') in samples, name
    for name in ("generation", "uptime_seconds", "failures_total", "workers_wanted"):
        assert (f"railgun_{name}", 'flow="served"') in samples, name


def test_label_values_are_escaped_and_counters_never_fall() -> None:
    totals = Totals()
    stage = 'say "hi"\\\n'
    figures = dict.fromkeys(("records", "written", "moved", "taken", "bytes", "keys"), 5)
    for life, records in ((1, 5), (1, 9), (2, 4), (2, 6)):
        totals.see(0, life, {"stages": {stage: figures | {"records": records}}, "errors": {"m": 1}})
    assert list(totals.of("records")) == [((("worker", "0"), ("stage", stage)), 15)]
    assert list(totals.of("errors")) == [((("worker", "0"), ("step", "m")), 2)]
    status = {"name": "x", "state": STATES[0], "workers": [], "generation": 1, "uptime": 1.5,
              "goal": 1, "failures": 0}  # fmt: skip
    text = prometheus(status, totals)
    assert 'railgun_records_total{flow="x",worker="0",stage="say \\"hi\\"\\\\\\n"} 15\n' in text


def test_a_port_in_use_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ListenError, match=f"{port}.*another port"),
            started(counting("port"), http=True, port=port, registry=tmp_path),
        ):
            pass
    assert Registry(tmp_path).jobs() == []
    token = "a token of one's own"
    with started(counting("port"), http=True, port=port, token=token, registry=tmp_path) as job:
        assert job.url == f"http://127.0.0.1:{port}"
        assert Http(job, tmp_path).token == job.token == token
        assert Http(job, tmp_path).ask("GET", "/health")[0] == 200


def test_a_flow_that_has_ended_says_so(tmp_path: Path) -> None:
    flow = counting("ended", rate=None, count=1000)
    with started(flow, http=True, registry=tmp_path) as job:
        api = Http(job, tmp_path)
        with api.open("/events") as stream:
            heard = [kind for kind, _, _ in told(stream)]
        assert heard[-1] == "end"
        assert job.wait(flows.DEADLINE)
        for path, body in (("/scale", {"workers": 3}), ("/stop", {}), ("/abort", {})):
            status, answer = api.ask("POST", path, body)
            assert status == 409
            assert "finished" in answer["error"]["message"]
        assert api.ask("GET", "/health")[0] == 200
        assert flows.check_whole(job) == 1000


def test_those_who_listen_hear_of_an_end_by_force(tmp_path: Path) -> None:
    with started(counting("forced"), http=True, registry=tmp_path) as job:
        running(job)
        api = Http(job, tmp_path)
        with api.open("/events") as stream:
            events = told(stream)
            next(events)
            assert api.ask("POST", "/abort", {})[0] == 202
            rest = list(events)
        assert rest[-1][0] == "end"
        assert rest[-1][1]["state"] == "failed"
        assert api.ask("GET", "/health") == (503, {"state": "failed"})
