"""What nodes say to agree comes back as it was; and nothing else comes in."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from railgun.broker.cluster import raft_messages as raft
from railgun.broker.protocol.raft.messages import (
    Append,
    Appended,
    AskRead,
    AskVote,
    Campaign,
    Entry,
    Hard,
    Install,
    Installing,
    Members,
    Message,
    ReadAt,
    Snapshot,
    Vote,
)
from railgun.transport.commands import KINDS, FrameError, FrameReader, encode
from railgun.transport.proto import raft_pb2 as r
from railgun.transport.proto import streams_pb2 as p

numbers = st.integers(0, raft.MAX_NUMBER - 1)
terms = st.integers(1, raft.MAX_NUMBER - 1)
large = st.integers(0, 2**64 - 1)
ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
names = st.lists(ids, max_size=4).map(tuple)
members = st.builds(Members, names, names)
entries = st.builds(Entry, numbers, numbers, st.binary(), st.none() | members)
snapshots = st.builds(Snapshot, numbers, numbers, members, st.binary())


@st.composite
def appends(draw: st.DrawFn) -> Append:
    before = draw(numbers)
    rising = sorted(draw(st.lists(terms, min_size=2, max_size=6)))
    some = tuple(
        Entry(before + 1 + at, term, draw(st.binary(max_size=9)), draw(st.none() | members))
        for at, term in enumerate(rising[1:-1])
    )
    return Append(rising[-1], before, rising[0], some, draw(numbers), draw(large))


@st.composite
def installs(draw: st.DrawFn) -> Install:
    offset, data, rest = draw(numbers), draw(st.binary()), draw(numbers)
    about = Snapshot(draw(numbers), draw(numbers), draw(members))
    return Install(draw(terms), about, offset, data, offset + len(data) + rest, draw(large))


messages = st.one_of(
    st.builds(AskVote, terms, numbers, numbers, st.booleans(), st.booleans()),
    st.builds(Vote, numbers, st.booleans(), st.booleans()),
    appends(),
    st.builds(Appended, numbers, st.booleans(), numbers, large, st.integers(-1, 2**62), numbers),
    installs(),
    st.builds(Installing, numbers, numbers, large, large),
    st.builds(Campaign, terms),
    st.builds(AskRead, numbers, large),
    st.builds(ReadAt, numbers, large, st.none() | numbers),
)


@given(messages)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    (frame,) = FrameReader().feed(b"".join(encode(raft.encode_message(message))))
    assert raft.decode_message(frame.command) == message


@given(entries, st.builds(Hard, numbers, st.none() | ids), snapshots)
def test_what_is_kept_comes_back_as_it_was(entry: Entry, hard: Hard, snapshot: Snapshot) -> None:
    told = r.Entry.FromString(raft.encode_entry(entry).SerializeToString())
    assert raft.decode_entry(told) == entry
    vote = r.Hard.FromString(raft.encode_hard(hard).SerializeToString())
    assert raft.decode_hard(vote) == hard
    whole = r.Snapshot.FromString(raft.encode_snapshot(snapshot).SerializeToString())
    assert raft.decode_snapshot(whole) == snapshot


@given(st.sampled_from([KINDS[number] for number in range(70, 79)]), st.binary(max_size=60))
def test_whatever_comes_is_a_message_or_a_named_error(kind: Any, data: bytes) -> None:
    with suppress(DecodeError):
        told = kind.FromString(data)
        with suppress(FrameError):
            raft.encode_message(raft.decode_message(told))


ABOUT = r.Snapshot(index=5, term=1)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (r.Append(term=2, prev_index=3, entries=[r.Entry(index=5, term=2)]), "entry 5 .* where 4"),
        (r.Append(term=2, prev_index=3, entries=[r.Entry(index=4, term=3)]), "of term 3"),
        (r.Append(term=2, prev_term=2, entries=[r.Entry(index=1, term=1)]), "of term 1"),
        (r.Append(), "needs a term"),
        (r.Campaign(), "needs a term"),
        (r.AskVote(term=1 << 63), "too large for a term"),
        (r.Install(term=1, snapshot=ABOUT, offset=3, data=b"abc", size=5), "3 bytes at 3"),
        (r.Install(term=1, snapshot=r.Snapshot(index=5, data=b"x")), "with the whole"),
        (p.Ping(), "Ping is not a message of Raft"),
    ],
)
def test_what_no_node_says_is_refused(told: Any, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        raft.decode_message(told)
