"""`railgun connector`: how flows are named, exit codes, what is told, and an end in order."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ingest.ready_connectors import DEADLINE, RAILGUN, Fed, eventually, fed, running, stop
from tests.ingest.test_webhooks import call, listening

from railgun.cli.commands.connector import command_error
from railgun.ingest.errors import RefusedError
from railgun.transport.registry import Registry

SECRET = "ab" * 16


def typed(*words: str | Path, **environment: str) -> tuple[int, list[Any]]:
    """A command, its exit code and what it told."""
    done = subprocess.run(
        [*RAILGUN, "connector", *words, "--json"],
        capture_output=True, text=True, timeout=DEADLINE, env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fed]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with fed(tmp_path_factory.mktemp("flow"), secret=SECRET, port=port) as running_flow:
        yield running_flow


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / f"{tmp_path.name}.log"
    path.write_bytes(b"one\ntwo\n")
    return path


def test_a_flow_is_named_in_three_ways(flow: Fed, lines: Path, tmp_path: Path) -> None:
    entry = Registry(flow.registry).find(flow.name)
    assert entry is not None
    (tmp_path / "token").write_text(entry.token + "\n")
    eventually(lambda: flow.job.status()["state"] == "running")
    worker = f"127.0.0.1:{_door(flow)}"
    ways: list[tuple[tuple[str | Path, ...], dict[str, str]]] = [
        ((flow.name, "--registry", flow.registry), {}),
        ((entry.url, "--token-file", tmp_path / "token"), {}),
        ((entry.url, "--source", "feed"), {"RAILGUN_TOKEN": entry.token}),
        ((worker,), {"RAILGUN_SECRET": SECRET}),
    ]
    for n, ((where, *more), environment) in enumerate(ways):
        words = ("tail", where, lines, "--once", "--prefix", f"{n}/", *more)
        code, answers = typed(*words, **environment)
        assert code == 0, answers
        assert answers[0] == {"connected": {"flow": str(where)}}
        assert answers[-1]["progress"]["acknowledged"] == 2
    eventually(lambda: {f"{n}/{lines.name}" for n in range(4)} <= flow.payloads().keys())


def test_exit_codes(flow: Fed, lines: Path, tmp_path: Path) -> None:
    entry = Registry(flow.registry).find(flow.name)
    assert entry is not None
    here = ("--registry", flow.registry)
    (tmp_path / "token").write_text("another-token-altogether")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, code, kind in (
            (("tail", "nobody", lines, "--timeout", "0.5", *here), 3, "no-flow"),
            (("tail", flow.name, lines, "--source", "other", *here), 8, "source"),
            (("tail", entry.url, lines, "--token-file", tmp_path / "token"), 8, "token"),
            (("tail", entry.url, lines, "--token-file", tmp_path / "nothing"), 2, "token"),
            (("tail", "host:port", lines), 2, "usage"),
            (("tail", "127.0.0.1:1", lines), 2, "usage"),  # no secret
            (("tail", flow.name, lines, "--poll", "0", *here), 2, "usage"),
            (("tail", flow.name), 2, "usage"),
            (("swim", flow.name), 2, "usage"),
            (("table", flow.name, "oracle://x", "t", "--id", "id", *here), 2, "usage"),
            (("http", flow.name, "--host", "0.0.0.0", *here), 2, "no-tls"),
            (("http", flow.name, "--certificate", "x", *here), 2, "usage"),
            (("http", flow.name, "--port", port, *here), 7, "listen"),
        ):
            got, answers = typed(*words)
            assert (got, answers[-1]["error"]["kind"]) == (code, kind), (words, answers)
    got, answers = typed("tail", f"127.0.0.1:{_door(flow)}", lines, RAILGUN_SECRET="cd" * 16)
    assert (got, answers[-1]["error"]["kind"]) == (8, "bad-secret")


def _door(flow: Fed) -> int:
    [source] = flow.job._controller.plan.pushed.values()
    assert source.port is not None
    return source.port


def test_words_for_people_and_an_end_in_order(flow: Fed, tmp_path: Path) -> None:
    logs = tmp_path / "people"
    logs.mkdir()
    for number in (signal.SIGINT, signal.SIGTERM):
        words = [*RAILGUN, "connector", "tail", flow.name, str(logs)]
        words += ["--registry", str(flow.registry)]
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        with running(process):
            assert process.stdout is not None
            assert process.stdout.readline() == f"connected to {flow.name}; Ctrl-C stops\n"
            process.send_signal(number)
            told, _ = process.communicate(timeout=DEADLINE)
            assert told == "stopped: 0 sent, 0 acknowledged, 0 streams\n"
            assert process.returncode == 0


def test_a_connector_waits_for_a_flow_that_starts_later(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"early\n")
    made = Fed(None, None, tmp_path, "late")  # type: ignore[arg-type]
    with (
        running(made.start("tail", str(tmp_path / "a.log"), "--once")) as process,
        fed(tmp_path, "late") as flow,
    ):
        told, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, told
        flow.check({"a.log": [b"early"]})


def test_webhooks_speak_tls_behind_a_token(flow: Fed, tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    words = (
        "http", "--port", "0", "--certificate", str(certificate), "--key", str(key),
        "--token", "a-token",
    )  # fmt: skip
    with running(flow.start(*words)) as process:
        url = listening(process)
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=certificate)
        request = urllib.request.Request(
            f"{url}/tls/0", b"secret", {"Authorization": "Bearer a-token"}
        )
        with urllib.request.urlopen(request, context=context, timeout=DEADLINE) as answer:
            assert json.load(answer) == {"id": 0}
        assert stop(process)[0] == 0


def _certificate(directory: Path) -> tuple[Path, Path]:
    certificate, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def test_the_health_of_webhooks(flow: Fed) -> None:
    with running(flow.start("http", "--port", "0")) as process:
        url = listening(process)
        status, told = call(f"{url}/health")
        assert (status, told["connected"]) == (200, True)
        assert stop(process)[0] == 0


def test_a_refused_message_is_a_stream_that_cannot_go_on() -> None:
    """Exit code 8 is for a program that the flow does not take at all."""
    message = command_error(RefusedError("BAD_PAYLOAD", "cannot be decoded", "t", 3))
    assert (message.code, message.kind) == (1, "bad-payload")
    program = command_error(RefusedError("BAD_SECRET", "another secret"))
    assert (program.code, program.kind) == (8, "bad-secret")
