"""The commands on streams, against a node that `railgun serve` runs in a process of its own."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from verification.ports import free_port

import railgun
from railgun.cli.commands.serve import read_config
from railgun.cli.errors import DONE, FAILED, NO_NODE, REFUSED, USAGE, CommandError
from railgun.cli.main import main

RAILGUN = [sys.executable, "-m", "railgun"]
RUNNING: list[subprocess.Popen[str]] = []  # of the test that runs


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """Also a test that fails leaves no process, and no open pipe."""
    yield
    for process in RUNNING:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    RUNNING.clear()


def started(*words: str, until: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A command in a process of its own, when it has told this; with what it told."""
    process = subprocess.Popen(
        [*RAILGUN, *words, "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    RUNNING.append(process)
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert until in told, told
    return process, told


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
    """End it in order: its exit code, and what else it told."""
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    return process.returncode, out


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Terminal:
    """Types commands for one node, and reads what they say."""

    def __init__(self, data: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        self.data = data
        self.capture = capfdbinary
        self.out = self.err = ""

    def type(self, *words: str, at: tuple[str, ...] | None = None) -> int:
        self.capture.readouterr()
        code = main([*words, *(("--data", str(self.data)) if at is None else at)])
        self.out, self.err = (told.decode() for told in self.capture.readouterr())
        return code

    def json(self, *words: str, at: tuple[str, ...] | None = None) -> tuple[int, list[Any]]:
        code = self.type(*words, "--json", at=at)
        assert self.err == ""
        return code, [json.loads(line) for line in self.out.splitlines()]

    def refused(self, *words: str, at: tuple[str, ...] | None = None) -> tuple[int, str]:
        """The exit code and the kind of an error, told to people and to programs."""
        code = self.type(*words, at=at)
        assert self.err.startswith("railgun: ")
        again, told = self.json(*words, at=at)
        assert again == code
        return code, told[-1]["error"]["kind"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("node") / "data"
    node, told = started("serve", "--port", "0", "--data", str(home), until="listening")
    assert told["recovery"] == {"streams": 0, "messages": 0, "found": []}
    RUNNING.remove(node)  # it is for all tests
    yield home
    code, out = stop(node)
    assert code == DONE
    assert json.loads(out.splitlines()[-1]) == {"stopped": True}


@pytest.fixture
def terminal(
    data: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Terminal:
    monkeypatch.setenv("COLUMNS", "200")
    return Terminal(data, capfdbinary)


# ---------------------------------------------------------------- streams


def test_a_stream_is_made_shown_and_changed(terminal: Terminal) -> None:
    code, [told] = terminal.json("stream", "ensure", "made", "--max-age", "3600", "--id-box", "60")
    assert (code, told["result"]) == (DONE, "CREATED")
    assert terminal.type("stream", "ensure", "made") == DONE
    assert "is so already" in terminal.out
    assert terminal.type("stream", "ensure", "made", "--max-age", "7200") == DONE
    assert "max_age is 3600.0, but 7200.0 was asked for" in terminal.out
    asked = ("stream", "ensure", "made", "--max-age", "none", "--mode")
    assert terminal.refused(*asked, "strict") == (REFUSED, "differs")
    assert terminal.type(*asked, "overwrite") == DONE
    assert "3600.0 → none" in terminal.out
    assert terminal.type("stream", "ensure", "made", "--max-age", "7200") == DONE
    assert "max_age is none, but 7200.0 was asked for" in terminal.out
    code, [told] = terminal.json("stream", "info", "made")
    assert told["stream"]["settings"]["max_age"] is None
    assert told["stream"]["settings"]["id_box"] == 60
    assert terminal.type("stream", "info", "made") == DONE
    assert "persistent" in terminal.out
    terminal.type("stream", "ensure", "made-of-air", "--ephemeral")
    assert terminal.type("stream", "ls") == DONE
    assert "made-of-air" in terminal.out
    code, [told] = terminal.json("stream", "ls")
    assert {"made", "made-of-air"} <= {stream["name"] for stream in told["streams"]}
    terminal.type("stream", "ensure", "_hidden")
    for words, shown in (((), False), (("--all",), True)):
        code, [told] = terminal.json("stream", "ls", *words)
        assert ("_hidden" in [stream["name"] for stream in told["streams"]]) is shown


# ---------------------------------------------------------------- messages


def test_messages_are_published_and_printed(terminal: Terminal) -> None:
    terminal.type("stream", "ensure", "few")
    assert terminal.type("sub", "few") == DONE
    assert terminal.out == ""
    assert terminal.json("pub", "few", "one", "two") == (
        DONE, [{"published": 2, "first": 0, "last": 1}],
    )  # fmt: skip
    assert terminal.type("pub", "few", "--id", "3", "three") == DONE
    assert terminal.out == "few: 1 message, offset 2\n"
    assert terminal.type("sub", "few") == DONE
    assert terminal.out == "one\ntwo\nthree\n"
    _, told = terminal.json("sub", "few", "--start", "1", "--count", "2")
    assert [(m["offset"], m["id"], m["headers"], m["payload"]) for m in told] == [
        (1, None, {}, "two"), (2, "3", {}, "three"),
    ]  # fmt: skip
    assert abs(told[0]["time"] - time.time()) < 60
    assert terminal.type("sub", "few", "--start", "end") == DONE
    assert terminal.out == ""


def test_an_id_is_stored_once(terminal: Terminal) -> None:
    terminal.type("stream", "ensure", "once")
    terminal.type("stream", "ensure", "once-ok", "--duplicates", "ok")
    for stream in ("once", "once-ok"):
        assert terminal.type("pub", stream, "a", "--id", "x") == DONE
    assert terminal.type("pub", "once-ok", "a", "--id", "x") == DONE
    code, [told] = terminal.json("pub", "once", "a", "--id", "x")
    assert code == REFUSED
    assert (told["error"]["kind"], told["error"]["offset"]) == ("duplicate-id", 0)
    assert terminal.refused("pub", "once", "a", "b", "--id", "x") == (USAGE, "usage")


def test_lines_come_in_and_go_out_through_pipes(terminal: Terminal, data: Path) -> None:
    terminal.type("stream", "ensure", "lines")
    lines = (
        b"".join(b"line %d\n" % n for n in range(50_000)) + b"\n\xff\xfe\nthe last, without an end"
    )
    at = ["--data", str(data)]
    done = subprocess.run(
        [*RAILGUN, "pub", "lines", *at, "--json"], input=lines, capture_output=True, check=True
    )
    assert json.loads(done.stdout) == {"published": 50_003, "first": 0, "last": 50_002}
    done = subprocess.run([*RAILGUN, "sub", "lines", *at], capture_output=True, check=True)
    assert done.stdout == lines + b"\n"
    _, told = terminal.json("sub", "lines", "--start", "50000")
    assert [m.get("payload") for m in told] == ["", None, "the last, without an end"]
    assert base64.b64decode(told[1]["base64"]) == b"\xff\xfe"
    subscribing = subprocess.Popen([*RAILGUN, "sub", "lines", *at], stdout=subprocess.PIPE)
    assert subscribing.stdout is not None
    assert subscribing.stdout.readline() == b"line 0\n"
    subscribing.stdout.close()  # as head does
    assert subscribing.wait(20) == FAILED


def test_a_group_goes_on_where_it_was(terminal: Terminal) -> None:
    terminal.type("stream", "ensure", "shared")
    terminal.type("pub", "shared", *"abcde")
    assert terminal.type("sub", "shared", "--group", "g", "--count", "2") == DONE
    assert terminal.out == "a\nb\n"
    _, [told] = terminal.json("group", "explain", "shared", "g")
    assert (told["group"]["floor"], told["group"]["lag"], told["group"]["code"]) == (
        2, 3, "NO_MEMBERS",
    )  # fmt: skip
    _, told = terminal.json("sub", "shared", "--group", "g")
    assert [(m["payload"], m["delivery"]) for m in told] == [("c", 1), ("d", 1), ("e", 1)]
    assert terminal.type("sub", "shared", "--group", "g", "--no-follow") == DONE
    assert terminal.out == ""
    assert terminal.type("group", "ls", "shared") == DONE
    assert "NO_MEMBERS" in terminal.out
    assert terminal.type("group", "explain", "shared", "g") == DONE
    assert "5 of 5: 0 to go" in terminal.out
    assert terminal.type("sub", "shared", "--group", "g", "--start", "4") == DONE
    assert terminal.out == "e\n"
    assert terminal.type("sub", "shared", "--group", "alone", "--exclusive") == DONE
    assert terminal.out == "a\nb\nc\nd\ne\n"
    assert terminal.refused("group", "explain", "shared", "h") == (REFUSED, "no-group")


def test_who_follows_waits_for_more_and_is_stopped_in_order(terminal: Terminal, data: Path) -> None:
    terminal.type("stream", "ensure", "long")
    terminal.type("pub", "long", "first")
    at = ("--data", str(data))
    follower, told = started("sub", "long", "--follow", "--group", "g", *at, until="payload")
    assert told["payload"] == "first"
    terminal.type("pub", "long", "second")
    assert follower.stdout is not None
    assert json.loads(follower.stdout.readline())["payload"] == "second"
    _, [found] = terminal.json("group", "explain", "long", "g")
    assert found["group"]["members"] == 1
    assert stop(follower, signal.SIGINT) == (DONE, "")
    _, [found] = terminal.json("group", "explain", "long", "g")
    assert (found["group"]["members"], found["group"]["lag"]) == (0, 0)


# ---------------------------------------------------------------- requests


def test_requests_are_answered_by_a_command_or_a_text(terminal: Terminal, data: Path) -> None:
    terminal.type("stream", "ensure", "questions", "--ephemeral")
    assert terminal.refused("req", "questions", "?") == (FAILED, "no-consumers")
    at = ("--data", str(data))
    program = "sh -c 'tr a-z A-Z; echo; echo !'"
    command, _ = started(
        "respond", "questions", "--matcher", "c.*", "--command", program, *at, until="answering"
    )
    text, _ = started(
        "respond", "questions", "--matcher", "t", "--text", "no", "--count", "1", *at,
        until="answering",
    )  # fmt: skip
    failing, _ = started(
        "respond", "questions", "--matcher", "f", "--command", "false", *at, until="answering"
    )
    assert terminal.type("req", "questions", "why?", "--topic", "c.x") == DONE
    assert terminal.out == "WHY?\n!\n"
    assert terminal.json("req", "questions", "why?", "--topic", "t") == (DONE, [{"payload": "no"}])
    assert text.wait(20) == DONE
    text.communicate()
    asked = ("req", "questions", "why?", "--topic", "f", "--timeout", "0.3")
    assert terminal.refused(*asked) == (FAILED, "rs-timeout")
    assert terminal.json("pub", "questions", "just so", "--topic", "c.x") == (
        DONE, [{"published": 1, "matched": 1}],
    )  # fmt: skip
    code, out = stop(command)
    assert code == DONE
    assert [json.loads(line)["payload"] for line in out.splitlines()] == ["why?"]
    code, out = stop(failing)
    assert code == DONE
    assert "exit code 1" in json.loads(out.splitlines()[0])["warning"]["message"]


def test_who_listens_gets_what_matches(terminal: Terminal, data: Path) -> None:
    terminal.type("stream", "ensure", "news", "--ephemeral")
    listener = subprocess.Popen(
        [*RAILGUN, "sub", "news", "--matcher", "a.#", "--count", "2", "--data", str(data)],
        stdout=subprocess.PIPE,
    )
    eventually(lambda: terminal.json("stream", "info", "news")[1][0]["stream"]["consumers"] == 1)
    for topic, message in (("a.b", "one"), ("b", "not this"), ("a.b.c", "two")):
        assert terminal.type("pub", "news", message, "--topic", topic) == DONE
    assert listener.communicate(timeout=20)[0] == b"one\ntwo\n"
    assert listener.returncode == DONE


# ---------------------------------------------------------------- dead letters


def test_dead_letters_are_listed_and_shown(terminal: Terminal, data: Path) -> None:
    terminal.type("stream", "ensure", "letters", "--dead-deliveries", "1")
    assert terminal.type("dlq", "ls", "letters") == DONE
    assert "no dead letters" in terminal.out
    terminal.type("pub", "letters", "good", "bad", "worse")

    async def consume() -> None:
        async with (
            await railgun.connect(data=data) as client,
            await client.subscribe("letters", group="g") as messages,
        ):
            for _ in range(3):
                message = await messages.next(5)
                if message.payload == b"good":
                    message.ack()
                else:
                    message.nack(reason=f"it is {message.text}")
            await messages.flush()

    asyncio.run(consume())

    def letters() -> list[Any]:
        return list(terminal.json("dlq", "ls", "letters")[1][0]["letters"])

    eventually(lambda: len(letters()) == 2)
    assert [(one["offset"], one["group"], one["reason"]) for one in letters()] == [
        ("1", "g", "it is bad"), ("2", "g", "it is worse"),
    ]  # fmt: skip
    assert terminal.type("dlq", "ls", "letters") == DONE
    assert "it is worse" in terminal.out
    assert terminal.type("dlq", "show", "letters", "--count", "1") == DONE
    assert terminal.out.startswith("letter 0: offset 1, group g")
    assert terminal.out.endswith("it is bad\nbad\n")
    _, told = terminal.json("dlq", "show", "letters")
    assert [one["payload"] for one in told] == ["bad", "worse"]
    assert terminal.refused("dlq", "ls", "nothing") == (REFUSED, "no-stream")


def test_a_consumer_with_an_id_goes_on_where_it_was(terminal: Terminal) -> None:
    terminal.type("stream", "ensure", "tracked")
    terminal.type("pub", "tracked", *"abc")
    assert terminal.type("sub", "tracked", "--consumer", "audit-1", "--count", "2") == DONE
    assert terminal.out == "a\nb\n"
    assert terminal.type("sub", "tracked", "--consumer", "audit-1", "--start", "end") == DONE
    assert terminal.out == "c\n"
    told = terminal.refused("sub", "tracked", "--consumer", "audit-1", "--group", "g")
    assert told == (USAGE, "usage")


def test_errors_have_no_numbers_of_the_system_and_no_bytes_of_python(
    terminal: Terminal, data: Path, tmp_path: Path
) -> None:
    terminal.type("stream", "ensure", "worded", "--max-ids", "5")
    terminal.type("pub", "worded", "a", "--id", "first")
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    nobody = ("--node", f"127.0.0.1:{free_port()}", "--secret-file", str(secret))
    missing = ("--data", str(data), "--secret-file", str(tmp_path / "none"))
    no_certificate = ("--data", str(data), "--certificate", str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    for words, at, expected in (
        (("pub", "worded", "b", "--id", "first"), None, "the ID 'first' is taken by offset 0"),
        (("stream", "ls"), nobody, "no node at 127.0.0.1"),
        (("stream", "ls"), missing, "No such file or directory"),
        (("stream", "ls"), no_certificate, "cannot be used: No such file or directory"),
        (("serve", "--port", "0"), ("--data", str(tmp_path / "file" / "x")), "Not a directory"),
    ):
        assert terminal.type(*words, at=at) != DONE
        assert expected in terminal.err
        for wrong in ("Errno", "b'", "..", "µs"):
            assert wrong not in terminal.err.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    "words",
    [
        ("sub", "s", "--group", ""), ("sub", "s", "--consumer", ""), ("pub", "s", "x", "--topic", ""),
        ("req", "s", "x", "--topic", ""), ("respond", "s", "--text", "x", "--group", ""),
    ],
)  # fmt: skip
def test_an_option_with_an_empty_value_is_refused_by_name(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*words]) == USAGE
    assert f"{words[-2]}: the value is empty" in capfd.readouterr().err


def test_sub_says_that_its_consumer_was_taken_over(terminal: Terminal, data: Path) -> None:
    terminal.type("stream", "ensure", "contested")
    terminal.type("pub", "contested", "a")
    at, who = ("--data", str(data)), ("--consumer", "audit")
    first, _ = started("sub", "contested", *who, "--follow", *at, until="payload")
    second, _ = started("sub", "contested", *who, "--follow", "--start", "0", *at, until="payload")
    out, _ = first.communicate(timeout=20)
    assert first.returncode == REFUSED
    [told] = map(json.loads, out.splitlines())
    assert told["error"]["kind"] == "consumer-taken"
    assert "taken over the consumer 'audit' of 'contested'" in told["error"]["message"]
    assert terminal.type("stream", "rm", "contested", "--yes") == DONE
    out, _ = second.communicate(timeout=20)
    assert second.returncode == REFUSED
    [told] = map(json.loads, out.splitlines())
    assert told["error"]["kind"] == "no-stream"
    assert "the stream 'contested' was deleted" in told["error"]["message"]


def test_dead_letters_are_redriven_and_taken_away(terminal: Terminal, data: Path) -> None:
    terminal.type("stream", "ensure", "again", "--dead-deliveries", "1")
    terminal.type("pub", "again", *"abc")

    async def refuse_all() -> None:
        async with (
            await railgun.connect(data=data) as client,
            await client.subscribe("again", group="g") as messages,
        ):
            for _ in range(3):
                (await messages.next(5)).nack()
            await messages.flush()

    asyncio.run(refuse_all())
    eventually(lambda: len(terminal.json("dlq", "ls", "again")[1][0]["letters"]) == 3)
    assert terminal.json("dlq", "redrive", "again", "--offset", "1") == (
        DONE, [{"stream": "again", "redriven": 1, "already": 0, "left": 2, "refused": []}],
    )  # fmt: skip
    assert terminal.type("dlq", "redrive", "again", "--offset", "1", "--offset", "7") == REFUSED
    assert terminal.out == (
        "again: 0 redriven, 2 left\n"
        "  letter 1 cannot be redriven: REDRIVEN: letter 1 of 'again' was redriven before\n"
        "  letter 7 cannot be redriven: NO_LETTER: stream 'again' has no dead letter 7: railgun dlq ls again\n"
    )
    [[one, two]] = [told["letters"] for told in terminal.json("dlq", "ls", "again")[1]]
    assert (one["letter"], two["letter"]) == (0, 2), "what was redriven is no dead letter any more"
    assert (one["rule"], one["redriven"]) == ("dead_deliveries", False)
    _, shown = terminal.json("dlq", "show", "again", "--count", "2")
    assert [letter["payload"] for letter in shown] == ["a", "c"]
    _, [told] = terminal.json("dlq", "ls", "again", "--all")
    assert [letter["redriven"] for letter in told["letters"]] == [False, True, False]
    assert terminal.type("dlq", "show", "again", "--all") == DONE
    assert (
        "letter 1: offset 1, group g, 1 deliveries, rule dead_deliveries, redriven\nb"
        in terminal.out
    )
    assert terminal.type("dlq", "redrive", "again", "--count", "1") == DONE
    assert terminal.out == "again: 1 redriven, 1 left\n"
    assert terminal.type("sub", "again", "--group", "g") == DONE
    assert terminal.out == "a\nb\n"
    terminal.type("stream", "purge", "again", "--yes")
    assert terminal.type("dlq", "redrive", "again") == REFUSED
    assert "again: 0 redriven, 1 left\n  letter 2 cannot be redriven: MESSAGE_GONE" in terminal.out
    assert terminal.refused("dlq", "purge", "again") == (USAGE, "not-confirmed")
    assert terminal.type("dlq", "purge", "again", "--before", "1", "--yes") == DONE
    assert terminal.out == "again.dlq: 1 message gone, begins at 1\n"
    assert terminal.type("dlq", "purge", "again", "--yes") == DONE
    assert terminal.type("dlq", "ls", "again") == DONE
    assert "no dead letters" in terminal.out
    assert terminal.json("dlq", "redrive", "again")[1][0]["redriven"] == 0
    assert terminal.refused("dlq", "redrive", "nothing") == (REFUSED, "no-stream")


def test_a_region_without_a_cluster_is_refused_by_name(terminal: Terminal) -> None:
    assert terminal.refused("stream", "ensure", "far", "--region", "eu") == (USAGE, "bad-settings")
    assert terminal.type("stream", "ensure", "far", "--region", "eu") == USAGE
    assert "region is 'eu': regions belong to a cluster, and this node is in none" in terminal.err
    assert terminal.refused("stream", "info", "far") == (REFUSED, "no-stream")


# ---------------------------------------------------------------- what destroys


def test_streams_are_purged_and_deleted_when_it_is_meant(terminal: Terminal) -> None:
    terminal.type("stream", "ensure", "brief")
    terminal.type("pub", "brief", *"abcd")
    for words in (("purge", "brief"), ("purge", "brief", "--before", "2"), ("rm", "brief")):
        assert terminal.refused("stream", *words) == (USAGE, "not-confirmed")
    assert terminal.json("stream", "purge", "brief", "--before", "3", "--yes") == (
        DONE, [{"stream": "brief", "first": 3, "end": 4, "purged": 3}],
    )  # fmt: skip
    assert terminal.type("sub", "brief") == DONE
    assert terminal.out == "d\n"
    assert terminal.type("stream", "purge", "brief", "--yes") == DONE
    assert terminal.out == "brief: 1 message gone, begins at 4\n"
    assert terminal.refused("stream", "purge", "brief", "--before", "9", "--yes") == (
        REFUSED, "offset-out-of-range",
    )  # fmt: skip
    assert terminal.json("stream", "rm", "brief", "--dead-letters", "--yes") == (
        DONE, [{"deleted": ["brief"]}],
    )  # fmt: skip
    assert terminal.refused("stream", "rm", "brief", "--yes") == (REFUSED, "no-stream")


def test_groups_are_reset_and_forgotten(terminal: Terminal, data: Path) -> None:
    terminal.type("stream", "ensure", "grouped")
    terminal.type("pub", "grouped", *"abcd")
    terminal.type("sub", "grouped", "--group", "g")
    assert terminal.refused("group", "reset", "grouped", "g", "start") == (USAGE, "not-confirmed")
    assert terminal.type("group", "reset", "grouped", "g", "1", "--yes") == DONE
    assert terminal.out == "g: goes on at 1\n"
    assert terminal.type("group", "info", "grouped", "g") == DONE
    assert "1 of 4: 3 to go" in terminal.out
    assert terminal.json("group", "reset", "grouped", "g", "end", "--yes")[1][0]["position"] == 4
    assert terminal.json("group", "info", "grouped", "g")[1][0]["group"]["lag"] == 0
    at = ("--data", str(data))
    follower, _ = started(
        "sub", "grouped", "--group", "g", "--start", "3", "--follow", *at, until="payload"
    )
    for words in (("reset", "grouped", "g", "start"), ("rm", "grouped", "g")):
        assert terminal.refused("group", *words, "--yes") == (REFUSED, "group-busy")
    assert stop(follower) == (DONE, "")
    assert terminal.refused("group", "reset", "grouped", "g", "9", "--yes")[0] == REFUSED
    assert terminal.refused("group", "reset", "grouped", "g", "middle") == (USAGE, "usage")
    assert terminal.refused("group", "rm", "grouped", "g") == (USAGE, "not-confirmed")
    assert terminal.json("group", "rm", "grouped", "g", "--yes") == (
        DONE, [{"stream": "grouped", "deleted": "g"}],
    )  # fmt: skip
    assert terminal.refused("group", "info", "grouped", "g") == (REFUSED, "no-group")
    assert terminal.json("group", "ls", "grouped") == (DONE, [{"groups": []}])


@pytest.mark.parametrize(
    ("answer", "code", "left"), [("n", FAILED, 1), ("", FAILED, 1), ("y", DONE, 0)]
)
def test_on_a_terminal_it_asks(
    terminal: Terminal, data: Path, answer: str, code: int, left: int
) -> None:
    terminal.type("stream", "ensure", "asked")
    terminal.type("stream", "purge", "asked", "--yes")
    terminal.type("pub", "asked", "a")
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*RAILGUN, "stream", "purge", "asked", "--data", str(data)], stdin=theirs,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        RUNNING.append(process)
        os.write(ours, f"{answer}\n".encode())
        out, error = process.communicate(timeout=20)
    finally:
        os.close(ours)
        os.close(theirs)
    assert out.startswith("delete all messages of asked? That cannot be taken back. [y/N] ")
    assert (process.returncode, "nothing was done" in error) == (code, code == FAILED)
    _, [told] = terminal.json("stream", "info", "asked")
    assert told["stream"]["end"] - told["stream"]["first"] == left


# ---------------------------------------------------------------- what goes wrong


def test_errors_tell_what_is_wrong(terminal: Terminal, data: Path, tmp_path: Path) -> None:
    terminal.type("stream", "ensure", "plain")
    terminal.type("stream", "ensure", "air", "--ephemeral")
    for words, expected in {
        ("pub", "nothing", "a"): (REFUSED, "no-stream"),
        ("sub", "nothing"): (REFUSED, "no-stream"),
        ("pub", "plain", "a", "--topic", "t"): (REFUSED, "not-ephemeral"),
        ("req", "plain", "a"): (REFUSED, "not-ephemeral"),
        ("respond", "plain", "--text", "a"): (REFUSED, "not-ephemeral"),
        ("respond", "air", "--command", "no-such-program"): (USAGE, "usage"),
        ("respond", "air"): (USAGE, "usage"),
        ("sub", "air", "--no-follow"): (USAGE, "usage"),
        ("sub", "plain", "--exclusive"): (USAGE, "usage"),
        ("sub", "plain", "--start", "middle"): (USAGE, "usage"),
        ("stream", "ensure", "no/name"): (USAGE, "bad-settings"),
        ("stream", "ensure", "plain", "--max-age", "-1"): (USAGE, "usage"),
    }.items():
        assert terminal.refused(*words) == expected, words
    where = json.loads((data / "node.json").read_text())
    node = ("--node", f"127.0.0.1:{where['port']}")
    secret = tmp_path / "secret"
    ls = ("stream", "ls")
    assert terminal.refused(*ls, at=(*node, "--secret-file", str(secret))) == (USAGE, "secret")
    secret.write_text("00" * 32)
    assert terminal.refused(*ls, at=(*node, "--secret-file", str(secret))) == (NO_NODE, "no-node")
    secret.write_bytes((data / "secret").read_bytes())
    assert terminal.type(*ls, at=(*node, "--secret-file", str(secret))) == DONE
    assert terminal.refused(*ls, at=("--data", str(tmp_path))) == (NO_NODE, "no-node")
    closed = ("--node", f"127.0.0.1:{free_port()}", "--secret-file", str(secret))
    assert terminal.type(*ls, at=closed) == NO_NODE
    assert terminal.refused("serve", "--port", "0") == (NO_NODE, "in-use")
    taken = ("serve", "--port", str(where["port"]))
    assert terminal.refused(*taken, at=("--data", str(tmp_path / "d"))) == (NO_NODE, "port-taken")
    openly = ("serve", "--host", "0.0.0.0")
    assert terminal.refused(*openly, at=("--data", str(tmp_path / "d"))) == (USAGE, "no-tls")


# ---------------------------------------------------------------- the node itself


def test_a_node_is_stopped_and_started_again_and_all_goes_on(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    config = tmp_path / "node.toml"
    ports = f"port = {free_port()}\nhttp_port = 0"
    config.write_text(f'[node]\ndata = "kept"\n{ports}\n')
    serve = ("serve", "--config", str(config))
    node, told = started(*serve, until="listening")
    assert told["listening"]["data"] == str(tmp_path / "kept")
    terminal = Terminal(tmp_path / "kept", capfdbinary)
    terminal.type("stream", "ensure", "s")
    terminal.type("pub", "s", "a", "b", "c")
    terminal.type("sub", "s", "--group", "g", "--count", "1")
    at = ("--data", str(tmp_path / "kept"))
    follower, _ = started("sub", "s", "--follow", *at, until="payload")
    assert follower.stdout is not None
    assert [json.loads(follower.stdout.readline())["offset"] for _ in "bc"] == [1, 2]
    assert stop(node) == (DONE, '{"stopped": true}\n')
    assert terminal.refused("stream", "ls") == (NO_NODE, "no-node")
    node, told = started(*serve, until="listening")
    assert told["recovery"] == {"streams": 1, "messages": 3, "found": []}
    assert terminal.type("sub", "s", "--group", "g") == DONE
    assert terminal.out == "b\nc\n"
    assert terminal.type("pub", "s", "d") == DONE
    line = follower.stdout.readline()
    assert json.loads(line).get("offset") == 3, line  # it has found the node again
    assert stop(follower) == (DONE, "")
    assert stop(node, signal.SIGINT) == (DONE, '{"stopped": true}\n')


SECRET = '[cluster]\nsecret_file = "secret"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[nodes]\n", "nodes is unknown"),
        ("[node]\nprot = 1\n", "node.prot is unknown"),
        ("[cluster]\nsize = 3\n", "cluster.size is unknown"),
        ("node = 3\n", "node is a section"),
        ('[node]\nport = "7171"\n', "node.port is 0 (any) to 65535, not '7171'"),
        ("[node]\nport = true\n", "node.port"),
        ("[node]\nhttp_port = false\n", "node.http_port is 0 (any) to 65535, not False"),
        ('[node]\nhttp_port = "off"\n', "node.http_port is 0 (any) to 65535"),
        ("[node]\ndata = 1\n", "node.data is text"),
        ("[node\n", "is no TOML"),
        ("[cluster]\n", "cluster.secret_file is missing"),
        ("[cluster]\nsecret_file = 1\n", "cluster.secret_file is the file"),
        ('[cluster]\nsecret_file = "none"\n', "cluster.secret_file: the cluster's secret"),
        (f"{SECRET}bootstrap_expect = 8\n", "cluster.bootstrap_expect is 0 (join) to 7 nodes"),
        (f'{SECRET}discovery = "x://a"\n', "cluster.discovery: there is no scheme x://"),
        (f"{SECRET}patience = 0\n", "cluster.patience: patience is 0.1 to 3600 seconds, not 0"),
        (f"{SECRET}master_wait = 0.1\n", "master_wait is 1 to 3600 seconds, not 0.1"),
        (f'[node]\nname = "a b"\n{SECRET}', "node.name is letters"),
        (f'[node]\nregions = {{"a b" = "master"}}\n{SECRET}', "node.regions is a table"),
        (f'[node]\nhost = "0.0.0.0"\n{SECRET}', "node.advertise is missing"),
        ("[node]\ncluster_port = 1\n", "node.cluster_port is unknown"),
    ],
)
def test_a_wrong_config_is_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    (tmp_path / "secret").write_text("ab" * 32)
    with pytest.raises(CommandError) as refused:
        read_config(file)
    assert expected in str(refused.value)
    assert refused.value.code == USAGE


def test_paths_in_a_config_begin_where_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[node]\ndata = "d"\nkey = "/k.pem"\nhost = "::1"\n')
    assert read_config(file) == {"data": tmp_path / "d", "key": Path("/k.pem"), "host": "::1"}
    with pytest.raises(CommandError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


def test_http_is_served_where_it_is_wanted(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text('[node]\ndata = "d"\nport = 0\nhttp_port = "none"\n')
    port = free_port()
    for words, expected in {
        ("--config", str(config)): None,
        ("--config", str(config), "--http-port", str(port)): f"http://127.0.0.1:{port}",
        ("--data", str(tmp_path / "e"), "--port", "0", "--http-port", "none"): None,
    }.items():
        node, told = started("serve", *words, until="listening")
        assert told["listening"]["http"] == expected
        if expected is not None:
            with urlopen(f"{expected}/health", timeout=10) as answer:
                told_health = json.loads(answer.read())
                assert told_health == {"healthy": True, "reasons": {}, "alarms": []}
            found = json.loads((tmp_path / "d" / "node.json").read_text())
            assert found["http"] == expected
        assert stop(node)[0] == DONE


@pytest.mark.parametrize("gone", ["all", "streams/orders", "streams/orders/stream.json"])
def test_a_node_whose_files_were_removed_does_not_say_that_all_is_on_disk(
    tmp_path: Path, gone: str
) -> None:
    home = tmp_path / "data"
    node, _ = started("serve", "--port", "0", "--data", str(home), until="listening")
    assert main(["stream", "ensure", "orders", "--data", str(home)]) == DONE
    where = home if gone == "all" else home / gone
    if where.is_dir():
        shutil.rmtree(where)
    else:
        where.unlink()
    code, out = stop(node)
    assert code == FAILED
    told = json.loads(out.splitlines()[-1])
    assert told["stopped"] is True
    assert any("orders" in one for one in told["not_on_disk"])
    assert any(str(home) in one for one in told["not_on_disk"])


def test_a_node_without_streams_whose_directory_was_removed_says_so(tmp_path: Path) -> None:
    home = tmp_path / "data"
    node, _ = started("serve", "--port", "0", "--data", str(home), until="listening")
    shutil.rmtree(home)
    code, out = stop(node)
    assert code == FAILED
    assert str(home) in json.loads(out.splitlines()[-1])["not_on_disk"][0]


def test_the_command_line_loads_neither_node_nor_client() -> None:
    program = (
        "import sys, railgun.cli.main; railgun.cli.main.parse(['status']); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "railgun.cli.arguments" in loaded
    assert (
        not {"asyncio", "google.protobuf", "railgun.broker.server", "railgun.client.client"}
        & loaded
    )
