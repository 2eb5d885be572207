"""`railgun cluster …`, typed at three real nodes, and how a node of `railgun serve` ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.broker.clustered import DEADLINE, Clustered, clustered
from verification.ports import free_ports

from railgun.cli import cluster_view as view
from railgun.cli.errors import DONE, FAILED, NO_NODE, REFUSED, USAGE
from railgun.cli.main import main
from railgun.client.client import connect
from railgun.client.errors import DuplicateIdError

RAILGUN = [sys.executable, "-m", "railgun"]


class Nodes:
    """A cluster in a thread of its own, for commands that have an event loop of theirs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cluster: Clustered
        self._loop: asyncio.AbstractEventLoop
        self._ends: asyncio.Event
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(),))

    async def _main(self) -> None:
        self._loop, self._ends = asyncio.get_running_loop(), asyncio.Event()
        async with clustered(self.path) as self.cluster:
            self._ready.set()
            await self._ends.wait()

    def do(self, work: Callable[[], Any]) -> Any:
        """Let the cluster's loop do something."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(DEADLINE)

    @contextmanager
    def running(self) -> Iterator[Nodes]:
        self._thread.start()
        assert self._ready.wait(DEADLINE)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._ends.set)
            self._thread.join()


class Terminal:
    """Types commands for a node, and reads what they say."""

    def __init__(self, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.path, self._capture = path, capfd
        self.out = self.err = ""

    def type(self, *words: str, at: str = "n1") -> int:
        self._capture.readouterr()
        code = main(["cluster", *words, "--data", str(self.path / at)])
        self.out, self.err = self._capture.readouterr()
        return code

    def json(self, *words: str, at: str = "n1") -> tuple[int, dict[str, Any]]:
        code = self.type(*words, "--json", at=at)
        return code, json.loads(self.out.splitlines()[-1])

    def refused(self, *words: str, at: str = "n1") -> tuple[int, str]:
        code, told = self.json(*words, at=at)
        assert self.type(*words, at=at) == code
        assert self.err.startswith("railgun: ")
        return code, told["error"]["kind"]

    def status(self) -> dict[str, Any]:
        """Once all is well."""
        code, told = self.json("status", "--wait", str(DEADLINE))
        assert code == DONE, told
        return dict(told["cluster"])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with Nodes(tmp_path_factory.mktemp("cluster")).running() as running:
        yield running


@pytest.fixture
def terminal(
    nodes: Nodes, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Terminal:
    monkeypatch.setenv("COLUMNS", "200")
    return Terminal(nodes.path, capfd)


def test_status_says_at_one_glance_that_all_is_well(terminal: Terminal) -> None:
    told = terminal.status()
    assert terminal.type("status", "--check") == DONE
    first = terminal.out.splitlines()[0]
    assert first == f"cluster {told['cluster']}: all is well, 3 of 3 nodes are up"
    for name in ("n1", "n2", "n3", "global", "active"):
        assert name in terminal.out
    assert terminal.out.count("up, leads") == 1


def test_nodes_are_listed(terminal: Terminal) -> None:
    assert terminal.type("nodes") == DONE
    assert all(name in terminal.out for name in ("n1", "n2", "n3", "127.0.0.1:"))
    code, told = terminal.json("nodes")
    assert code == DONE
    assert [one["name"] for one in told["nodes"]] == ["n1", "n2", "n3"]


def test_a_region_and_the_lead_are_transferred(terminal: Terminal) -> None:
    told = terminal.status()
    names = {one["id"]: one["name"] for one in told["nodes"]}
    to = next(n for id, n in names.items() if id != told["regions"][0]["master"])
    assert terminal.type("transfer", to, "--region", "global") == DONE
    assert terminal.out == f"{to}: is the master of global\n"
    led = next(n for id, n in names.items() if id != told["leader"])
    assert terminal.type("transfer", led, "--leader") == DONE
    assert terminal.out == f"{led}: leads\n"
    told = terminal.status()
    assert names[told["regions"][0]["master"]] == to
    assert names[told["leader"]] == led


def test_a_stream_is_made_in_a_region_and_acks_are_asked_for(
    terminal: Terminal, capfd: pytest.CaptureFixture[str]
) -> None:
    def type_(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main([*words, "--data", str(terminal.path / "n1")])
        return code, "".join(capfd.readouterr())

    assert type_("stream", "ensure", "here", "--region", "global") == (DONE, "here: made\n")
    code, told = type_("stream", "ensure", "here", "--region", "mars")
    assert (code, "region is 'global', but 'mars' was asked for" in told) == (DONE, True)
    code, told = type_("stream", "ensure", "there", "--region", "mars")
    assert (code, "mars" in told) == (REFUSED, True)
    assert "global" in type_("stream", "info", "here")[1]
    assert type_("pub", "here", "a", "--acks", "all") == (DONE, "here: 1 message, offset 0\n")
    assert type_("pub", "here", "b", "--acks", "master") == (DONE, "here: 1 message, offset 1\n")
    assert type_("pub", "here", "c", "--acks", "none") == (DONE, "here: 1 message\n")


def test_settings_are_shown_and_changed(terminal: Terminal) -> None:
    assert terminal.type("settings") == DONE
    assert "master_wait" in terminal.out
    code, told = terminal.json("settings", "master_wait=6", "prune_after=3600")
    assert code == DONE
    assert (told["settings"]["master_wait"], told["settings"]["prune_after"]) == (6, 3600)
    code, told = terminal.json("settings", "prune_after=none")
    assert (code, told["settings"]["prune_after"]) == (DONE, None)


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (("transfer", "n1"), USAGE, "usage"),
        (("transfer", "n1", "--leader", "--region", "global"), USAGE, "usage"),
        (("transfer", "n9", "--leader"), REFUSED, "unknown-node"),
        (("transfer", "n1", "--region", "far"), REFUSED, "no-region"),
        (("settings", "patience"), USAGE, "usage"),
        (("settings", "patience=long"), USAGE, "usage"),
        (("settings", "patience=0"), USAGE, "bad-settings"),
        (("settings", "colour=1"), USAGE, "bad-settings"),
        (("remove", "n1"), USAGE, "not-confirmed"),
        (("remove", "n9", "--yes"), REFUSED, "unknown-node"),
        (("remove", "n1", "--wait", "601", "--yes"), USAGE, "usage"),
        (("keep", "n9"), REFUSED, "unknown-node"),
        (("join", "127.0.0.1:1"), REFUSED, "is-member"),
        (("status", "--watch", "--check"), USAGE, "usage"),
    ],
)
def test_what_makes_no_sense_is_refused(
    terminal: Terminal, words: tuple[str, ...], code: int, kind: str
) -> None:
    assert terminal.refused(*words) == (code, kind)


def _hears_ctrl_c() -> None:
    """Also if these tests are run by a shell in the background, which lets nobody hear it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_watching_goes_on_until_it_is_ended(terminal: Terminal) -> None:
    words = ["cluster", "status", "--watch", "--every", "0.1", "--json"]
    process = subprocess.Popen(
        [*RAILGUN, *words, "--data", str(terminal.path / "n2")],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_hears_ctrl_c,
    )
    assert process.stdout is not None
    try:
        told = [json.loads(process.stdout.readline())["cluster"] for _ in range(3)]
        assert [one["name"] for one in told] == ["n2"] * 3
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE)  # and reads what it still has to say
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_node_joins_leaves_stays_and_goes(nodes: Nodes, terminal: Terminal) -> None:
    cluster = nodes.cluster
    nodes.do(lambda: cluster.start("n4", bootstrap_expect=0, discovery=""))
    where = f"127.0.0.1:{cluster.ports[0]}"
    assert terminal.refused("remove", "n1", "--yes", at="n4") == (REFUSED, "no-cluster")
    assert terminal.type("status", at="n4") == DONE
    assert terminal.out.startswith("no cluster yet\n")
    assert "NO_CLUSTER" in terminal.out
    assert terminal.type("status", "--check", at="n4") == FAILED
    assert terminal.type("nodes", at="n4") == DONE
    assert terminal.refused("join", "127.0.0.1:1", "--wait", "0.2", at="n4") == (
        FAILED,
        "not-joined",
    )
    assert terminal.type("join", where, "--wait", str(DEADLINE), at="n4") == DONE
    assert len(terminal.status()["nodes"]) == 4
    code, told = terminal.json("remove", "n4", "--wait", "0", "--yes")
    assert (code, told["result"]) == (DONE, "LEAVING")
    if terminal.type("keep", "n4") == DONE:  # unless it was quicker
        assert terminal.out == "n4: stays\n"
        assert terminal.type("remove", "n4", "--wait", str(DEADLINE), "--yes") == DONE
        assert terminal.out.startswith("n4: no member any more")
    nodes.do(lambda: cluster.stop("n4"))
    assert len(terminal.status()["nodes"]) == 3


def test_no_node_no_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert Terminal(tmp_path, capfd).refused("status") == (NO_NODE, "no-node")


def test_alarms_are_shown_with_what_to_do() -> None:
    told = view.alarm(
        {
            "code": "NODE_SILENT", "severity": "warning", "about": "n3", "text": "n3 is silent",
            "todo": "Start it",
        }
    )  # fmt: skip
    assert str(told) == "NODE_SILENT: n3 is silent. Start it"


# ---------------------------------------------------------------- real processes


def _files(path: Path, settings: str) -> list[str]:
    names = ["n1", "n2", "n3"]
    ports = dict(zip(names, zip(free_ports(3), free_ports(6)[3:], strict=True), strict=True))
    where = ",".join(f"127.0.0.1:{cluster}" for _, cluster in ports.values())
    (path / "secret").write_text("ab" * 32)
    for name, (port, cluster) in ports.items():
        (path / f"{name}.toml").write_text(
            f'[node]\nname = "{name}"\ndata = "{name}"\nport = {port}\nhttp_port = "none"\n'
            f'cluster_port = {cluster}\n[cluster]\nsecret_file = "secret"\n'
            f'discovery = "static://{where}"\nbootstrap_expect = 3\n{settings}\n'
        )
    return names


class Process:
    """A node of `railgun serve`."""

    def __init__(self, path: Path, name: str) -> None:
        command = [*RAILGUN, "serve", "--config", str(path / f"{name}.toml"), "--json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def listening(self) -> None:
        assert self._process.stdout is not None
        assert "listening" in json.loads(self._process.stdout.readline())

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self._process.terminate()
        out, _ = self._process.communicate(timeout=DEADLINE)
        assert json.loads(out.splitlines()[-1]) == {"stopped": True}
        return self._process.returncode

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.mark.slow
def test_a_rolling_restart_of_processes_is_not_noticed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = _files(tmp_path, "election = 0.8\npatience = 1.0")
    running = {name: Process(tmp_path, name) for name in names}
    terminal = Terminal(tmp_path, capfd)

    async def publish(ends: threading.Event, offsets: dict[str, int], at: list[float]) -> None:
        where = [json.loads((tmp_path / name / "node.json").read_text()) for name in names]
        secret = (tmp_path / "n1" / "secret").read_text().strip()
        nodes = [f"{one['host']}:{one['port']}" for one in where]
        async with await connect(nodes, secret=secret, timeout=10.0) as client:
            await client.ensure("orders")
            while not ends.is_set():
                name = f"m{len(offsets)}"
                try:
                    offsets[name] = await client.publish("orders", name, id=name, timeout=10.0)
                except DuplicateIdError as error:  # its first try was stored
                    offsets[name] = error.offset
                at.append(time.monotonic())
            end = (await client.describe("orders"))["end"]
            async with await client.subscribe("orders") as sub:
                kept = [(await sub.next(DEADLINE)).text for _ in range(end)]
            assert kept == list(offsets)

    ends, offsets, at = threading.Event(), dict[str, int](), list[float]()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(publish(ends, offsets, at))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    try:
        for process in running.values():
            process.listening()
        terminal.status()
        thread.start()
        for name in names:
            assert running[name].stop() == os.EX_OK
            seen = len(at)
            running[name] = Process(tmp_path, name)
            running[name].listening()
            assert terminal.json("status", "--wait", str(DEADLINE), at=name)[0] == DONE
            assert not errors
            assert len(at) > seen  # it went on meanwhile
        ends.set()
        thread.join(DEADLINE)
        assert not errors
        longest = max(b - a for a, b in itertools.pairwise(at))
        print(f"longest gap in a rolling restart: {longest * 1000:.0f} ms, {len(at)} messages")
        assert sorted(offsets.values()) == list(range(len(offsets)))
    finally:
        ends.set()
        for process in running.values():
            process.kill()
        if thread.ident is not None:
            thread.join(DEADLINE)


@pytest.mark.slow
def test_a_minority_is_told_of_and_read_from_by_commands(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two of three processes are killed; word of where they listened is left, and one of their ports is taken."""
    names = _files(tmp_path, "election = 0.8\npatience = 1.0\nmaster_wait = 1")
    terminal = Terminal(tmp_path, capfd)
    running: dict[str, Process] = {}

    def typed(*words: str, at: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main([*words, "--data", str(tmp_path / at)])
        out, err = capfd.readouterr()
        return code, out + err

    try:
        running = {name: Process(tmp_path, name) for name in names}
        terminal.status()  # it waits for the node of its directory, which is about to start
        assert typed("stream", "ensure", "orders", at="n1")[0] == DONE
        assert typed("pub", "orders", "hello", at="n1")[0] == DONE
        assert terminal.type("status", "--wait", str(DEADLINE), at="n3") == DONE
        for name in ("n1", "n2"):
            running[name].kill()
        end = time.monotonic() + DEADLINE
        while "no quorum" not in typed("cluster", "status", at="n3")[1]:
            assert time.monotonic() < end
            time.sleep(0.1)
        code, told = typed("sub", "orders", at="n3")
        assert code == DONE, told
        assert "hello" in told
        code, told = typed("stream", "info", "orders", at="n3")
        assert code == DONE, told
        assert terminal.type("status", "--wait", "1", at="n3") == FAILED
        # A stale node.json of a killed node that names the port of one that runs:
        there = json.loads((tmp_path / "n3/node.json").read_text())
        stale = json.loads((tmp_path / "n1/node.json").read_text())
        (tmp_path / "n1/node.json").write_text(json.dumps(stale | {"port": there["port"]}))
        assert typed("cluster", "status", at="n1")[0] == NO_NODE
        assert terminal.type("status", "--wait", "1", at="n1") == NO_NODE
        running["n1"] = Process(tmp_path, "n1")
        running["n2"] = Process(tmp_path, "n2")
        assert terminal.type("status", "--wait", str(DEADLINE), at="n1") == DONE
    finally:
        for process in running.values():
            process.kill()
