"""The flow's side of a sink outside: whatever the sink and the connection do, records come out once, or an error."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from tests.sinkserver.sinks import Served, Shelf, eventually, outside, place, served

from railgun.flows.errors import ConnectorError, LostOutputError, may_pass
from railgun.flows.sink import TwoPhaseWriter
from railgun.sinks.external import MAX_RECORD_BYTES, PIECE_BYTES, Outside
from railgun.sinkserver import server as sink_server
from railgun.sinkserver.file_target import FileTarget
from railgun.sinkserver.server import SinkServer
from railgun.sinkserver.targets import BadRecordError
from railgun.transport.commands import Frame
from railgun.transport.proto import sinks_pb2 as s


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def sink(tmp_path: Path, shelf: Shelf) -> Iterator[Served]:
    with served(tmp_path / "sink", shelf) as made:
        yield made


def opened(sink: Outside, *given: Any, **options: Any) -> TwoPhaseWriter[Any]:
    made = sink.open(place(*given, **options))
    assert isinstance(made, TwoPhaseWriter)
    return made


def numbers(shelf: Shelf) -> list[int]:
    return [json.loads(item) for item in shelf.items]


def test_what_is_prepared_is_seen_when_it_is_committed_once(sink: Served, shelf: Shelf) -> None:
    flow = outside(sink)
    writer = opened(flow)
    writer.write([1, 2])
    token = writer.prepare(1)
    writer.write([3])
    assert shelf.items == []
    flow.commit(token)
    flow.commit(json.loads(json.dumps(token)))
    assert numbers(shelf) == [1, 2]
    assert writer.prepare(2) is not None
    assert writer.prepare(3) is None, "nothing was written"
    writer.close()


def test_much_is_sent_in_pieces_and_all_of_it_comes(sink: Served, shelf: Shelf) -> None:
    flow = outside(sink, format="bytes")
    writer = opened(flow)
    items = [n.to_bytes(4, "big") * 5000 for n in range(500)]  # 10 MB
    for at in range(0, len(items), 7):
        writer.write(items[at : at + 7])
    flow.commit(writer.prepare(1))
    assert shelf.items == items
    writer.close()


def test_formats_and_what_does_not_fit_them(sink: Served, shelf: Shelf) -> None:
    for format, items in (("json", [{"a": "ä"}]), ("text", ["ä"]), ("bytes", [b"\x00\n"])):
        flow = outside(sink, format=format)
        writer = opened(flow)
        writer.write(items)
        flow.commit(writer.prepare(1))
        writer.close()
    assert shelf.items == ['{"a":"ä"}'.encode(), "ä".encode(), b"\x00\n"]
    writer = opened(outside(sink))
    with pytest.raises(ConnectorError, match="cannot send the set"):
        writer.write([1, {2}])
    with pytest.raises(ConnectorError, match="too long"):
        writer.write(["x" * MAX_RECORD_BYTES])
    assert writer.prepare(2) is None, "nothing of those batches is sent"
    writer.close()


# ---------------------------------------------------------------- connections that are lost


def test_a_lost_connection_is_made_anew_and_the_rest_is_sent(sink: Served, shelf: Shelf) -> None:
    flow = outside(sink, format="bytes")
    writer = opened(flow)
    items = [n.to_bytes(4, "big") * (PIECE_BYTES // 10) for n in range(60)]
    for n, item in enumerate(items):
        writer.write([item])
        if n % 9 == 4:
            sink.cut()
    sink.cut()
    token = writer.prepare(1)
    sink.cut()
    flow.commit(token)
    assert shelf.items == items
    writer.close()


def test_a_sink_that_restarts_goes_on_with_what_it_has(sink: Served, shelf: Shelf) -> None:
    flow = outside(sink)
    writer = opened(flow)
    writer.write([1])
    writer.flush()
    eventually(lambda: [t.end for t in sink.server.participant.txns.values()] == [5], "it has come")
    sink.stop()
    sink.start()
    writer.write([2])
    token = writer.prepare(1)
    sink.stop()
    sink.start()
    flow.commit(token)
    assert numbers(shelf) == [1, 2]
    writer.close()


def test_a_sink_that_comes_late_is_waited_for(tmp_path: Path, shelf: Shelf) -> None:
    sink = Served(tmp_path / "sink", shelf)
    flow = pickle.loads(pickle.dumps(outside(sink)))
    writer = opened(flow)
    tokens: list[Any] = []

    def work() -> None:
        writer.write(["late"])
        tokens.append(writer.prepare(1))

    thread = threading.Thread(target=work)
    thread.start()
    assert tokens == []
    sink.start()
    try:
        thread.join()
        flow.commit(tokens[0])
        assert shelf.items == [b'"late"']
        writer.close()
    finally:
        sink.stop()


def test_a_sink_that_never_comes_is_an_error_that_may_pass(tmp_path: Path) -> None:
    flow = Outside(data=tmp_path, timeout=0.05)
    writer = opened(flow)
    writer.write([1])
    with pytest.raises(
        ConnectorError, match=r"could not be reached for 0\.05 s: no sink works"
    ) as caught:
        writer.prepare(1)
    assert may_pass(caught.value)
    with pytest.raises(ConnectorError, match="commit: the sink could not be reached") as caught:
        flow.commit({"txn": "a" * 32, "generation": 1, "snapshot": 1})
    assert may_pass(caught.value)


def test_whoever_listens_there_but_says_nothing_is_no_sink(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        flow = Outside(f"127.0.0.1:{silent.getsockname()[1]}", secret="00" * 16, timeout=0.05)
        with pytest.raises(ConnectorError, match="could not be reached") as caught:
            flow.recover("demo", "out", 1, [])
    assert may_pass(caught.value)


def test_a_wrong_secret_is_an_error_that_stays(sink: Served) -> None:
    flow = Outside(f"127.0.0.1:{sink.port}", secret="00" * 16)
    with pytest.raises(ConnectorError, match="secret") as caught:
        flow.recover("demo", "out", 1, [])
    assert not may_pass(caught.value)


def test_a_sink_that_has_lost_bytes_sends_the_flow_back(sink: Served, shelf: Shelf) -> None:
    writer = opened(outside(sink))
    writer.write([1])
    writer.flush()
    writer.write([2])
    writer.flush()
    assert writer.prepare(1) is not None
    writer.write([3])
    writer.flush()
    [txn] = [t for t in sink.server.participant.txns.values() if t.state == "open"]
    transaction = writer.transaction  # type: ignore[attr-defined]
    transaction.keep_trying(transaction._take_answer)
    sink.stop()
    assert txn.log is not None
    txn.log.path.unlink()
    sink.start()
    with pytest.raises(
        ConnectorError, match="has lost a part of what it had: 0 of 5 bytes"
    ) as caught:
        writer.prepare(2)
    assert may_pass(caught.value)
    writer.close()


# ---------------------------------------------------------------- votes


class Closing(SinkServer):
    """Ends the connection around its vote."""

    when = ""

    async def done(self, frames: list[Frame]) -> tuple[list[Message], bool]:
        voting = any(isinstance(frame.command, s.Prepare) for frame in frames)
        answered = await super().done(frames)
        if voting and Closing.when:
            when, Closing.when = Closing.when, ""
            if when == "before":
                self._cut()
            else:
                asyncio.get_running_loop().call_soon(self._cut)
        return answered

    def _cut(self) -> None:
        for connection in list(self._sessions):
            connection.transport.abort()


@pytest.mark.parametrize("when", ["before", "after", ""])
@pytest.mark.parametrize("yes", [True, False])
def test_the_sink_votes_and_closes(tmp_path: Path, shelf: Shelf, yes: bool, when: str) -> None:
    def refuse() -> None:
        raise BadRecordError("record 1 is ugly", 1)

    with served(tmp_path / "sink", shelf, kind=Closing) as sink:
        flow = outside(sink)
        writer = opened(flow)
        writer.write([1, 2])
        writer.flush()
        if not yes:
            shelf.before_check = refuse
        Closing.when = when
        if yes:
            token = writer.prepare(1)
            assert Closing.when == "", "the connection was ended"
            flow.commit(token)
            assert numbers(shelf) == [1, 2]
        else:
            with pytest.raises(ConnectorError, match="ugly") as caught:
                writer.prepare(1)
            assert may_pass(caught.value), "the flow goes back, and tries again"
            assert Closing.when == ""
            assert sink.server.participant.txns == {}
        writer.close()
        shelf.before_check = lambda: None
        flow.recover("demo", "out", 2, [])
        again = opened(flow, 2)
        again.write([3])
        flow.commit(again.prepare(2))
        assert numbers(shelf) == ([1, 2, 3] if yes else [3])
        again.close()


def test_a_no_says_why(sink: Served, shelf: Shelf) -> None:
    def refuse() -> None:
        raise BadRecordError("record 1 is ugly", 1)

    shelf.before_check = refuse
    writer = opened(outside(sink))
    writer.write([1])
    with pytest.raises(
        ConnectorError, match=r"sink 'out'.*the sink votes no: record 1 is ugly \(BAD_RECORD\)"
    ):
        writer.prepare(1)
    kinds = [kind for kind, _ in sink.heard]
    assert kinds == ["vote-no"]
    writer.close()


# ---------------------------------------------------------------- recovery


def test_a_generation_begins_tokens_are_committed_the_rest_is_not(
    sink: Served, shelf: Shelf
) -> None:
    flow = outside(sink)
    first, second = opened(flow), opened(flow, worker=1)
    first.write([1])
    second.write([2])
    tokens = [first.prepare(3), second.prepare(4)][::-1]
    first.write([10])
    assert first.prepare(5) is not None
    second.write([20])
    second.flush()
    eventually(lambda: len(sink.server.participant.txns) == 4, "all have come")
    flow.recover("demo", "out", 2, tokens)
    flow.recover("demo", "out", 2, tokens)
    assert numbers(shelf) == [1, 2], "in the order of their snapshots"
    assert sink.server.participant.txns == {}
    first.write([11])
    with pytest.raises(ConnectorError, match="generation 1 is over"):
        first.prepare(6)
    first.close()
    second.close()


def test_other_flows_and_steps_are_left_alone(sink: Served, shelf: Shelf) -> None:
    flow = outside(sink)
    writer = opened(flow)
    writer.write([1])
    token = writer.prepare(1)
    flow.recover("demo", "other", 9, [])
    flow.recover("other", "out", 9, [])
    flow.commit(token)
    assert numbers(shelf) == [1]
    writer.close()


def test_what_is_lost_is_told(sink: Served) -> None:
    with pytest.raises(
        LostOutputError, match="neither prepared here nor known as committed"
    ) as caught:
        outside(sink).commit({"txn": "a" * 32, "generation": 1, "snapshot": 1})
    assert not may_pass(caught.value)
    with pytest.raises(ConnectorError, match="not a token of Outside"):
        outside(sink).commit({"staged": "x"})


def test_what_was_written_after_the_last_prepare_is_thrown_away_by_close(
    sink: Served, shelf: Shelf
) -> None:
    flow = outside(sink)
    writer = opened(flow)
    writer.write([1])
    token = writer.prepare(1)
    writer.write([2])
    writer.flush()
    writer.close()
    eventually(lambda: len(sink.server.participant.txns) == 1, "it is thrown away")
    flow.commit(token)
    assert numbers(shelf) == [1]


# ---------------------------------------------------------------- at least once


@pytest.mark.parametrize("options", [{"mode": "at-least-once"}, {}])
def test_without_snapshots_each_flush_is_seen(
    sink: Served, shelf: Shelf, options: dict[str, Any]
) -> None:
    flow = outside(sink, **options)
    writer = opened(flow, transactional=bool(options))
    writer.write([1])
    writer.flush()
    assert numbers(shelf) == [1]
    writer.flush()
    writer.write([2])
    if options:
        assert writer.prepare(1) is None
        assert numbers(shelf) == [1, 2]
    sink.cut()
    writer.write([3])
    writer.close()
    assert numbers(shelf) == [1, 2, 3]


def test_a_target_that_fails_for_a_while_is_tried_again(sink: Served, shelf: Shelf) -> None:
    def full() -> None:
        raise OSError(28, "no space left")

    flow = outside(sink)
    writer = opened(flow)
    writer.write([1])
    token = writer.prepare(1)
    shelf.before_apply = full
    with pytest.raises(ConnectorError, match="no space left") as caught:
        flow.commit(token)
    assert may_pass(caught.value)
    shelf.before_apply = lambda: None
    flow.recover("demo", "out", 2, [token])
    assert numbers(shelf) == [1]
    writer.close()


def test_a_slow_target_is_not_a_sink_that_is_gone(
    sink: Served, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_server, "PONG_INTERVAL_S", 0.02)
    flow = outside(sink, timeout=0.2)
    writer = opened(flow)
    writer.write([1])

    def slow() -> None:
        threading.Event().wait(0.8)

    shelf.before_check = shelf.before_apply = slow
    flow.commit(writer.prepare(1))
    assert numbers(shelf) == [1]
    assert len(shelf.applied) == 1
    writer.close()


def test_a_full_disk_of_the_sink_sends_the_flow_back(
    sink: Served, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> int:
        raise OSError(28, "no space left")

    flow = outside(sink)
    writer = opened(flow)
    writer.write([1])
    with monkeypatch.context() as patch:
        patch.setattr("railgun.sinkserver.staged.os.pwrite", full)
        with pytest.raises(ConnectorError, match=r"no space left.*NO_SPACE") as caught:
            writer.prepare(1)
    assert may_pass(caught.value)
    writer.close()
    flow.recover("demo", "out", 2, [])
    again = opened(flow, 2)
    again.write([1])
    flow.commit(again.prepare(2))
    assert numbers(shelf) == [1]
    again.close()


def test_an_address_and_a_secret_are_enough(tmp_path: Path) -> None:
    target = FileTarget(tmp_path / "out.txt")
    with served(tmp_path / "sink", target, secret=b"s" * 16) as sink:
        flow = Outside(f"127.0.0.1:{sink.port}", secret=b"s" * 16, format="text")
        writer = opened(flow)
        writer.write(["hello"])
        flow.commit(writer.prepare(1))
        writer.close()
    assert target.path.read_text() == "hello\n"
    with pytest.raises(ConnectorError, match="is not the address of a sink"):
        Outside("nowhere")
    with pytest.raises(ConnectorError, match="hexadecimal"):
        Outside("127.0.0.1:1", secret="xyz")


@pytest.mark.parametrize("transactional", [True, False])
def test_a_commit_whose_answer_is_lost_is_asked_for_again(
    tmp_path: Path, shelf: Shelf, transactional: bool
) -> None:
    """At least once, and without snapshots: the transaction is committed, and nothing of it is there any more."""

    class Cutting(SinkServer):
        armed = True

        async def done(self, frames: list[Frame]) -> tuple[list[Message], bool]:
            answers = await super().done(frames)
            if self.armed and any(isinstance(frame.command, s.Commit) for frame in frames):
                self.armed = False
                for connection in list(self._sessions):
                    connection.transport.abort()
            return answers

    with served(tmp_path / "cut", shelf, kind=Cutting) as sink:
        writer = outside(sink, mode="at-least-once").open(place(transactional=transactional))
        writer.write([1])
        writer.flush()
        writer.write([2])
        writer.flush()
        writer.close()
    assert numbers(shelf) == [1, 2]


def test_time_in_which_a_sink_was_at_work_does_not_count_when_it_is_lost(
    sink: Served, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_server, "PONG_INTERVAL_S", 0.02)
    flow = outside(sink, timeout=0.4)
    writer = opened(flow)
    writer.write([1])
    token = writer.prepare(1)

    def slow() -> None:
        shelf.before_apply = lambda: None
        threading.Event().wait(0.6)
        sink.cut()

    shelf.before_apply = slow
    flow.commit(token)
    assert numbers(shelf) == [1]
    writer.close()
