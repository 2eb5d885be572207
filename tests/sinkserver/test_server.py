"""A sink that listens: nothing a client sends or leaves out ends it, and others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sinkserver.sinks import Served, Shelf, eventually, new, outside, place, served

from railgun.errors import RailgunError
from railgun.flows.sink import TwoPhaseWriter
from railgun.ingest.errors import SinkError
from railgun.sinks.external import Outside, _Link
from railgun.sinkserver import server as sink_server
from railgun.sinkserver.server import SinkServer
from railgun.sinkserver.targets import TargetError
from railgun.transport import connection as connection_module
from railgun.transport.commands import KINDS, LARGEST, encode
from railgun.transport.hello import HelloError
from railgun.transport.listen_rules import OpenListenError
from railgun.transport.packed_records import pack
from railgun.transport.proto import sinks_pb2 as s
from railgun.transport.proto import streams_pb2 as p

PATIENCE = 20.0


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def sink(tmp_path: Path, shelf: Shelf) -> Iterator[Served]:
    with served(tmp_path / "sink", shelf) as made:
        yield made


@pytest.fixture
def link(sink: Served) -> Iterator[_Link]:
    """A peer that knows the secret."""
    with contextlib.closing(dial(sink)) as made:
        yield made


def dial(sink: Served) -> _Link:
    return _Link(outside(sink).where.find(), PATIENCE)


def raw(link: _Link) -> socket.socket:
    return link._socket


def ended(link: _Link) -> None:
    """Wait until the sink has ended this session."""
    with contextlib.suppress(ConnectionResetError):
        while raw(link).recv(1 << 16):
            pass


def works(sink: Served, shelf: Shelf) -> None:
    """It does for others what it is there for."""
    before = len(shelf.items)
    flow = outside(sink)
    writer = flow.open(place(99))
    assert isinstance(writer, TwoPhaseWriter)
    writer.write(["works"])
    flow.commit(writer.prepare(before + 1))
    writer.close()
    assert shelf.items[before:] == [b'"works"']


# ---------------------------------------------------------------- who may come in


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"RAILGUN1" + b"\xff" * 500, b"\x00" * 9000]
)
def test_whoever_says_no_hello_is_turned_away(sink: Served, shelf: Shelf, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", sink.port), PATIENCE) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 16):
                pass
    works(sink, shelf)


def test_a_wrong_secret_or_version_is_told(sink: Served, shelf: Shelf) -> None:
    wrong = Outside(f"127.0.0.1:{sink.port}", secret="ab" * 20).where.find()
    with pytest.raises(HelloError) as caught:
        _Link(wrong, PATIENCE)
    assert caught.value.code == "BAD_SECRET"
    eventually(
        lambda: [data["code"] for kind, data in sink.heard if kind == "refused"] == ["BAD_SECRET"]
    )
    works(sink, shelf)


def test_one_that_connects_and_says_nothing_is_let_go(
    sink: Served, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HELLO_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", sink.port), PATIENCE) as silent:
        assert len(silent.recv(1 << 16)) == 40, "what the sink says first"
        assert silent.recv(1 << 16) == b""
    monkeypatch.undo()
    works(sink, shelf)


# ---------------------------------------------------------------- what is sent wrongly


def test_bytes_that_are_no_frame_end_the_session(sink: Served, shelf: Shelf, link: _Link) -> None:
    raw(link).sendall(b"\xff" * 100)
    found = link.answer()
    assert (type(found), found.code) == (p.Failed, "BAD_FRAME")
    ended(link)
    works(sink, shelf)


def test_a_frame_that_is_too_large_is_refused_before_it_has_come(
    sink: Served, shelf: Shelf, link: _Link
) -> None:
    raw(link).sendall(struct.pack("<I", LARGEST + 1))
    found = link.answer()
    assert found.code == "BAD_FRAME"
    assert f"{LARGEST + 1:,} bytes" in found.text
    ended(link)
    works(sink, shelf)


def test_commands_of_others_end_the_session(sink: Served, shelf: Shelf, link: _Link) -> None:
    link.send(p.Publish())
    assert link.answer().code == "BAD_FRAME"
    ended(link)
    works(sink, shelf)


def test_bytes_with_a_gap_before_them_end_the_session(
    sink: Served, shelf: Shelf, link: _Link
) -> None:
    txn = new()
    link.send(s.Begin(txn=txn, flow="demo", step="out", generation=1))
    assert link.answer().end == 0
    link.send(s.Data(txn=txn, start=7), pack([b"x"]))
    assert link.answer().code == "BAD_OFFSET"
    ended(link)
    works(sink, shelf)


def test_frames_without_sense_are_answered_and_the_sink_lives(sink: Served, shelf: Shelf) -> None:
    draw = random.Random(5)
    kinds = [kind for number, kind in KINDS.items() if number in (1, *range(60, 70))]
    known = [new() for _ in range(3)]
    words = ["", "demo", "out", "é" * 400, "../..", "x" * 3000, *known, *known]
    numbers = [0, 1, 2, 7, (1 << 31) - 1]
    blobs = [b"", b"x", pack([b"a", b"b"]), pack([b"a"])[:-1], bytes(60), b"\xff" * 9]

    def command() -> list[Any]:
        made = draw.choice(kinds)()
        for field in made.DESCRIPTOR.fields:
            if field.message_type is not None or draw.random() < 0.2:
                continue
            if field.type == field.TYPE_STRING:
                setattr(made, field.name, draw.choice(words))
            elif field.type == field.TYPE_BOOL:
                setattr(made, field.name, draw.random() < 0.5)
            else:
                setattr(made, field.name, draw.choice(numbers))
        return encode(made, [draw.choice(blobs)])

    answered = 0
    for _ in range(150):
        with contextlib.closing(dial(sink)) as link, contextlib.suppress(OSError):
            raw(link).sendall(b"".join(b"".join(command()) for _ in range(8)))
            for _ in range(8):
                link.answer()
                answered += 1
    assert answered > 200
    works(sink, shelf)


# ---------------------------------------------------------------- those who are slow, or gone


def test_one_that_reads_no_answers_is_ended(
    sink: Served, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_server, "MAX_UNREAD_BYTES", 100_000)
    greedy = dial(sink)
    raw(greedy).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    asked = b"".join(encode(s.Commit(txn=new()))) * 5000

    def flood() -> None:
        with contextlib.suppress(OSError):
            while True:
                raw(greedy).sendall(asked)

    flooding = threading.Thread(target=flood)
    flooding.start()
    eventually(
        lambda: ("refused", "SLOW") in [(kind, data.get("code")) for kind, data in sink.heard]
    )
    eventually(lambda: not sink.server._sessions, "the session is ended")
    with contextlib.suppress(OSError):
        raw(greedy).shutdown(socket.SHUT_RDWR)
    greedy.close()
    flooding.join()
    works(sink, shelf)


def test_one_that_stops_within_a_frame_disturbs_nobody(sink: Served, shelf: Shelf) -> None:
    half = b"".join(encode(s.Data(txn=new()), [bytes(1000)]))[:-1]
    links = [dial(sink) for _ in range(20)]
    for link in links:
        raw(link).sendall(half)
    works(sink, shelf)
    sink.stop()  # and it ends, though they stay
    sink.start()
    works(sink, shelf)
    for link in links:
        link.close()


def test_a_sender_is_not_read_while_the_sink_is_busy(
    sink: Served, shelf: Shelf, link: _Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_server, "MAX_PENDING_BYTES", 1 << 20)
    busy, free = threading.Event(), threading.Event()

    def wait() -> None:
        busy.set()
        assert free.wait(PATIENCE)

    txn, data = new(), pack([b"x" * 100_000])
    link.send(s.Begin(txn=txn, flow="demo", step="out", generation=1))
    assert link.answer().end == 0
    shelf.before_check = wait
    other = outside(sink).open(place(5))
    other.write([1])
    voting = threading.Thread(target=other.prepare, args=(1,))  # type: ignore[attr-defined]
    voting.start()
    assert busy.wait(PATIENCE)
    count = 500  # 50 MB, more than the system takes for us
    start = [n * len(data) for n in range(count)]

    def send() -> None:
        for at in start:
            link.send(s.Data(txn=txn, start=at), data)

    sending = threading.Thread(target=send)
    sending.start()
    sessions = list(sink.server._sessions.values())
    eventually(lambda: any(session._paused for session in sessions), "it is not read any more")
    assert max(session._pending_bytes for session in sessions) <= (1 << 20) + (1 << 19)
    assert sending.is_alive()
    free.set()
    voting.join()
    for at in start:
        assert link.answer().end == at + len(data)
    sending.join()
    other.close()


def test_two_connections_commit_the_same_at_once(sink: Served, shelf: Shelf) -> None:
    flow = outside(sink)
    writer = flow.open(place())
    assert isinstance(writer, TwoPhaseWriter)
    tokens = []
    for n in range(20):
        writer.write([n])
        tokens.append(writer.prepare(n + 1))
    together = threading.Barrier(8)

    def commit(seed: int) -> None:
        mine = random.Random(seed).sample(tokens, len(tokens))
        together.wait()
        for token in mine:
            flow.commit(token)

    threads = [threading.Thread(target=commit, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shelf.items == [b"%d" % n for n in range(20)]
    writer.close()


# ---------------------------------------------------------------- where it listens


def test_it_listens_openly_with_tls_only(tmp_path: Path, shelf: Shelf) -> None:
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(OpenListenError, match="certificate"):
            asyncio.run(SinkServer(shelf, tmp_path / "sink", host=host, port=0).start())
    assert not (tmp_path / "sink").exists()


def test_with_a_certificate_it_speaks_tls(tmp_path: Path, shelf: Shelf) -> None:
    line = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    line += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    line += ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(line, check=True, capture_output=True)
    files = {"certificate": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    with served(tmp_path / "sink", shelf, **files) as sink:
        works(sink, shelf)
        secret = (tmp_path / "sink" / "secret").read_text()
        flow = Outside(f"127.0.0.1:{sink.port}", secret=secret, certificate=tmp_path / "cert.pem")
        flow.recover("demo", "out", 1, [])
        plain = Outside(f"127.0.0.1:{sink.port}", secret=secret, timeout=0.05)
        with pytest.raises(Exception, match="could not be reached"):
            plain.recover("demo", "out", 1, [])


def test_one_sink_works_in_a_directory_and_its_secret_is_its_own(
    sink: Served, shelf: Shelf
) -> None:
    assert (sink.data / "secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(SinkError, match="another sink works in") as caught:
        asyncio.run(SinkServer(Shelf(), sink.data, port=0).start())
    assert caught.value.code == "IN_USE"
    with pytest.raises(SinkError, match="cannot listen") as caught:
        asyncio.run(SinkServer(Shelf(), sink.data.parent / "other", port=sink.port).start())
    assert caught.value.code == "PORT_TAKEN"
    works(sink, shelf)
    sink.stop()
    assert not (sink.data / "sink.json").exists()


def test_a_command_that_is_too_long_is_refused(sink: Served, shelf: Shelf, link: _Link) -> None:
    frame = b"".join(encode(s.Begin(txn=new(), flow="x" * 1_000_000, step="out", generation=1)))
    with contextlib.suppress(OSError):
        raw(link).sendall(frame)
    failed = link.answer()
    assert (failed.code, failed.text) == (
        "BAD_FRAME",
        "Begin of 1,000,045 bytes: 32,768 are the most",
    )
    works(sink, shelf)


def test_strangers_are_let_in_in_small_numbers(sink: Served, shelf: Shelf) -> None:
    assert sink.server._listener is not None
    assert sink.server._listener.gate is not None
    sink.server._listener.gate.most = 5
    with contextlib.ExitStack() as strangers:
        for _ in range(5):
            made = strangers.enter_context(socket.create_connection(("127.0.0.1", sink.port)))
            assert made.recv(100), "a hello"
        more = strangers.enter_context(socket.create_connection(("127.0.0.1", sink.port)))
        more.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            assert more.recv(100) == b"", "turned away"
    works(sink, shelf)


def test_a_text_that_is_longer_than_a_frame_is_shortened(sink: Served, link: _Link) -> None:
    def refuse() -> None:
        raise ValueError("x" * (2 * LARGEST))

    shelf = sink.target
    assert isinstance(shelf, Shelf)
    txn, data = new(), pack([b"1"])
    shelf.before_check = refuse
    link.send(s.Begin(txn=txn, flow="demo", step="out", generation=1))
    link.send(s.Data(txn=txn), data)
    link.send(s.Prepare(txn=txn, snapshot=1, end=len(data), count=1))
    assert [link.answer().end for _ in range(2)] == [0, len(data)]
    vote = link.answer()
    assert not vote.yes
    assert len(vote.text) < 3000
    link.send(s.Prepare(txn=txn, snapshot=1, end=len(data), count=1))
    assert link.answer().text == vote.text
    kept = sink.server.participant._refused
    assert [type(one) for told in kept.values() for one in told] == [str, str], "no tracebacks"


def test_a_session_that_cannot_answer_ends(
    sink: Served, shelf: Shelf, link: _Link, monkeypatch: pytest.MonkeyPatch
) -> None:

    with monkeypatch.context() as patch:
        patch.setattr(sink.server, "_answer", lambda frame, heard: None)
        link.send(p.Ping(number=1))
        with pytest.raises(ConnectionResetError):  # and no silence
            link.answer()
    works(sink, shelf)


def test_more_is_left_over_than_fits_into_an_answer(
    sink: Served, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_server, "MAX_LISTED_TRANSACTIONS", 2)
    flow = outside(sink)
    for _ in range(5):
        writer = flow.open(place())
        assert isinstance(writer, TwoPhaseWriter)
        writer.write([1])
        writer.prepare(1)
        writer.close()
    flow.recover("demo", "out", 2, [])
    assert sink.server.participant.txns == {}


def test_a_target_that_is_stuck_is_interrupted_when_the_sink_stops(
    sink: Served, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_server, "STOP_TIMEOUT_S", 0.05)
    busy, interrupted = threading.Event(), threading.Event()

    def wait() -> None:
        busy.set()
        assert interrupted.wait(PATIENCE)
        raise TargetError("interrupted")

    shelf.before_check = wait
    monkeypatch.setattr(shelf, "interrupt", interrupted.set)
    writer = outside(sink, timeout=0.5).open(place(5))
    writer.write([1])

    def vote() -> None:
        with contextlib.suppress(OSError, RailgunError):  # whatever it hears of a sink that ends
            writer.prepare(1)  # type: ignore[attr-defined]

    voting = threading.Thread(target=vote)
    voting.start()
    assert busy.wait(PATIENCE)
    sink.stop()
    assert interrupted.is_set()
    voting.join()
