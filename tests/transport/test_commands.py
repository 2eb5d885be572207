"""Frames between clients and nodes: whatever bytes come, they are frames or a named error."""

from __future__ import annotations

import asyncio
import itertools
import resource
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railgun.transport.commands import KINDS, LARGEST, FrameError, FrameReader, encode
from railgun.transport.connection import Connection
from railgun.transport.listener import Listener
from railgun.transport.proto import cluster_pb2 as nodes
from railgun.transport.proto import connectors_pb2 as c
from railgun.transport.proto import raft_pb2 as raft
from railgun.transport.proto import sinks_pb2 as sinks
from railgun.transport.proto import streams_pb2 as p


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary())),
    st.integers(1, 50),
)
def test_frames_come_as_they_were_sent_in_whatever_pieces(
    sent: list[tuple[int, int, bytes]], piece: int
) -> None:
    data = b"".join(
        bytes(part)
        for channel, number, blob in sent
        for part in encode(p.Ping(number=number), [blob], channel)
    )
    reader, found = FrameReader(), []
    for at in range(0, len(data), piece):
        for frame in reader.feed(data[at : at + piece]):
            found.append((frame.channel, frame.command.number, bytes(frame.blob)))
    assert found == sent


@given(st.binary(max_size=200))
def test_garbage_is_a_named_error_or_not_yet_a_frame(data: bytes) -> None:
    reader = FrameReader()
    with suppress(FrameError):
        for frame in reader.feed(data):
            assert type(frame.command) in KINDS.values()


@given(st.data())
def test_a_frame_with_a_changed_byte_is_another_frame_or_a_named_error(data: st.DataObject) -> None:
    command = p.Deliver(ranges=[p.Range(first=7, count=3, delivery=1)], epoch=2, topic="a.b")
    whole = bytearray(b"".join(bytes(part) for part in encode(command, [b"some blob"], 4)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with suppress(FrameError):
        list(FrameReader().feed(bytes(whole)))


def test_a_frame_that_is_too_large_is_refused_before_it_has_come() -> None:
    with pytest.raises(FrameError, match="8,388,609 bytes"):
        list(FrameReader().feed(struct.pack("<I", LARGEST + 1)))
    with pytest.raises(FrameError, match="between 12"):
        list(FrameReader().feed(struct.pack("<I", 3)))


def test_every_command_has_a_number_and_comes_back() -> None:
    every = {
        kind
        for schema in (p, c, sinks, raft, nodes)
        for kind in vars(schema).values()
        if isinstance(kind, type) and hasattr(kind, "FromString")
    }
    parts = {
        *(p.Range, p.Refused, p.Staging, c.Point, sinks.Uncommitted),
        *(raft.Members, raft.Entry, raft.Hard, raft.Snapshot),
        *(nodes.Run, nodes.Standing, nodes.Listener, nodes.Part),
    }
    assert every - parts == set(KINDS.values())
    for kind in KINDS.values():
        (frame,) = FrameReader().feed(b"".join(map(bytes, encode(kind()))))
        assert type(frame.command) is kind


def test_a_command_of_a_later_version_is_named() -> None:
    data = bytearray(b"".join(map(bytes, encode(p.Ping()))))
    data[8] = 200
    with pytest.raises(FrameError, match=r"no command 200: the other side is of a later version"):
        list(FrameReader().feed(bytes(data)))


def test_the_code_of_the_schema_is_that_of_the_schema(tmp_path: Path) -> None:
    home = Path(p.__file__).parent
    made = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    schemas = sorted(map(str, home.glob("*.proto")))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{home}", *made, *schemas]
    subprocess.run(command, check=True, timeout=60)
    for path in tmp_path.iterdir():
        assert path.read_text() == (home / path.name).read_text(), "call ./run proto"
    assert len(list(tmp_path.iterdir())) == 2 * len(schemas)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=6), st.integers(1000, 200_000))
def test_large_frames_that_come_in_pieces_are_what_was_sent(sizes: list[int], piece: int) -> None:
    sent = [(n, bytes([n % 251]) * size) for n, size in enumerate(sizes, 1)]
    stream = b"".join(b"".join(encode(p.Ping(number=n), [blob], n)) for n, blob in sent)
    whole, raw = FrameReader(), FrameReader()
    found, unread = [], []
    for at in range(0, len(stream), piece):
        found += [(f.command.number, bytes(f.blob)) for f in whole.feed(stream[at : at + piece])]
        unread += [(f.channel, bytes(f.frame().blob)) for f in raw.raw(stream[at : at + piece])]
    assert found == unread == sent
    assert whole.begun == raw.begun == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 300_000), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 200_000), st.booleans()), min_size=1),
    st.booleans(),
)
def test_large_frames_that_are_read_to_where_they_stay_are_what_was_sent(
    sizes: list[int], steps: list[tuple[int, bool]], raw: bool
) -> None:
    sent = [(n, bytes([n % 251]) * size) for n, size in enumerate(sizes, 1)]
    stream = b"".join(b"".join(encode(p.Ping(number=n), [blob], n)) for n, blob in sent)
    reader, at = FrameReader(), 0
    found: list[tuple[int, bytes]] = []
    for piece, direct in itertools.cycle(steps):
        some = stream[at : at + piece]
        room = reader.room()
        if direct and room is not None:
            some = some[: len(room)]
            room[: len(some)] = some
            reader.filled(len(some))
            came = b""
        else:
            came = some
        for frame in [one.frame() for one in reader.raw(came)] if raw else reader.feed(came):
            frame.blob[:1] = frame.blob[:1]  # it may be changed
            found.append((frame.channel, bytes(frame.blob)))
        at += len(some)
        if at == len(stream):
            break
    assert found == sent
    assert reader.begun == 0
    assert reader.room() is None


def test_a_frame_that_is_whole_and_not_taken_yet_has_no_more_room() -> None:
    whole = b"".join(encode(p.Ping(number=7), [bytes(100_000)]))
    reader = FrameReader()
    assert not list(reader.feed(whole[:50_000]))
    room = reader.room()
    assert room is not None
    rest = whole[50_000:] + whole[:10]
    room[: len(rest)] = rest
    reader.filled(len(rest))
    assert (reader.room(), reader.missing) == (None, 0)
    assert [len(frame.blob) for frame in reader.feed(whole[10:])] == [100_000, 100_000]


def test_who_announces_a_large_frame_has_not_got_the_memory_yet() -> None:
    page = resource.getpagesize()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    before, readers = resident(), [FrameReader(1 << 30) for _ in range(20)]
    for reader in readers:
        assert not list(reader.feed(struct.pack("<I", 100 << 20)))
        assert reader.missing == (100 << 20)
    assert resident() - before < 20 << 20


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_large_frames_over_a_connection(loop: str) -> None:
    sizes = [10, 70_000, 3_000_000, 0, 65_536, 500_000]
    sent = [(n, bytes([n]) * size) for n, size in enumerate(sizes, 1)]

    async def main() -> list[tuple[int, bytes]]:
        reader, done = FrameReader(), asyncio.Event()
        found: list[tuple[int, bytes]] = []

        def heard(connection: Connection, data: bytes) -> None:
            found.extend((frame.channel, bytes(frame.blob)) for frame in reader.feed(data))
            if len(found) == len(sent):
                done.set()

        def came(connection: Connection) -> None:
            connection.filling = reader

        def left(connection: Connection, error: Exception | None) -> None:
            pass

        def nothing(*_: object) -> None:
            pass

        running = asyncio.get_running_loop()
        listener = Listener(lambda: Connection(b"x", came, heard, left))
        where = "127.0.0.1", await listener.open("127.0.0.1", 0)
        opened = asyncio.Event()
        _, dialled = await running.create_connection(
            lambda: Connection(b"x", lambda _: opened.set(), nothing, left, {"a": "b"}), *where
        )
        async with asyncio.timeout(30):
            await opened.wait()
            for n, blob in sent:
                dialled.send(b"".join(encode(p.Ping(number=n), [blob], n)))
            await done.wait()
        dialled.abort()
        await listener.close()
        return found

    run = asyncio.run if loop == "asyncio" else pytest.importorskip("uvloop").run
    assert run(main()) == sent
