"""Encode and decode Raft's messages, and what is kept of its log, as protobuf (`proto/raft.proto`).

Rules:

1. Every message of `broker.protocol.raft.messages` is decoded to what was encoded; so are entries, hard states and
   snapshots.
2. The machine trusts its peers to follow Raft. A message that no correct node sends is refused here, as a `FrameError`:
   entries that do not follow each other, a piece outside of its snapshot, a leader without a term, numbers that no log
   will ever reach.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeAlias

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
from railgun.transport.commands import FrameError
from railgun.transport.proto import raft_pb2 as r

WireMessage: TypeAlias = (
    r.AskVote
    | r.Vote
    | r.Append
    | r.Appended
    | r.Install
    | r.Installing
    | r.Campaign
    | r.AskRead
    | r.ReadAt
)
MAX_NUMBER: Final = 1 << 62
"""Upper bound of terms and indexes: they can be incremented many times below it."""


# ---------------------------------------------------------------- stored data


def encode_members(members: Members) -> r.Members:
    """Encode the voters and learners."""
    return r.Members(voters=members.voters, learners=members.learners)


def decode_members(stored: r.Members) -> Members:
    """Decode the voters and learners."""
    return Members(tuple(stored.voters), tuple(stored.learners))


def encode_entry(entry: Entry) -> r.Entry:
    """Encode an entry of the log.

    >>> decode_entry(encode_entry(Entry(7, 2, b"x", Members(("a",)))))
    Entry(index=7, term=2, data=b'x', members=Members(voters=('a',), learners=()))
    """
    members = None if entry.members is None else encode_members(entry.members)
    return r.Entry(index=entry.index, term=entry.term, data=entry.data, members=members)


def decode_entry(stored: r.Entry) -> Entry:
    """Decode an entry of the log."""
    members = decode_members(stored.members) if stored.HasField("members") else None
    return Entry(stored.index, stored.term, stored.data, members)


def encode_hard(hard: Hard) -> r.Hard:
    """Encode the hard state: the term and the vote."""
    return r.Hard(term=hard.term, vote=hard.vote or "")


def decode_hard(stored: r.Hard) -> Hard:
    """Decode the hard state: the term and the vote."""
    return Hard(stored.term, stored.vote or None)


def encode_snapshot(snapshot: Snapshot) -> r.Snapshot:
    """Encode a snapshot: the state up to an index."""
    return r.Snapshot(
        index=snapshot.index,
        term=snapshot.term,
        members=encode_members(snapshot.members),
        data=snapshot.data,
    )


def decode_snapshot(stored: r.Snapshot) -> Snapshot:
    """Decode a snapshot: the state up to an index."""
    return Snapshot(stored.index, stored.term, decode_members(stored.members), stored.data)


# ---------------------------------------------------------------- messages


def encode_message(message: Message) -> WireMessage:
    """Encode a message for the wire.

    >>> decode_message(encode_message(ReadAt(3, 9, None)))
    ReadAt(term=3, number=9, index=None)
    """
    match message:
        case Append(term, prev_index, prev_term, entries, commit, round):
            return r.Append(
                term=term,
                prev_index=prev_index,
                prev_term=prev_term,
                entries=map(encode_entry, entries),
                commit=commit,
                round=round,
            )
        case Appended(term, ok, index, round, hint, hint_term):
            return r.Appended(
                term=term, ok=ok, index=index, round=round, hint=hint, hint_term=hint_term
            )
        case AskVote(term, last_index, last_term, pre, transfer):
            return r.AskVote(
                term=term, last_index=last_index, last_term=last_term, pre=pre, transfer=transfer
            )
        case Vote(term, granted, pre):
            return r.Vote(term=term, granted=granted, pre=pre)
        case Install(term, snapshot, offset, data, size, round):
            about = encode_snapshot(replace(snapshot, data=b""))
            return r.Install(
                term=term, snapshot=about, offset=offset, data=data, size=size, round=round
            )
        case Installing(term, index, offset, round):
            return r.Installing(term=term, index=index, offset=offset, round=round)
        case Campaign(term):
            return r.Campaign(term=term)
        case AskRead(term, number):
            return r.AskRead(term=term, number=number)
        case ReadAt(term, number, index):
            return r.ReadAt(term=term, number=number, index=index or 0, known=index is not None)


def decode_message(message: Any) -> Message:
    """Decode a message. Raise `FrameError` if no correct node sends it."""
    match message:
        case r.Append():
            return _append(message)
        case r.Appended():
            _check_numbers(message.term, message.index, message.hint_term)
            return Appended(
                message.term,
                message.ok,
                message.index,
                message.round,
                message.hint,
                message.hint_term,
            )
        case r.AskVote():
            _check_numbers(message.term, message.last_index, message.last_term)
            _check_term(message.term)
            return AskVote(
                message.term, message.last_index, message.last_term, message.pre, message.transfer
            )
        case r.Vote():
            _check_numbers(message.term)
            return Vote(message.term, message.granted, message.pre)
        case r.Install():
            return _install(message)
        case r.Installing():
            _check_numbers(message.term, message.index)
            return Installing(message.term, message.index, message.offset, message.round)
        case r.Campaign():
            _check_numbers(message.term)
            _check_term(message.term)
            return Campaign(message.term)
        case r.AskRead():
            _check_numbers(message.term)
            return AskRead(message.term, message.number)
        case r.ReadAt():
            _check_numbers(message.term, message.index)
            return ReadAt(message.term, message.number, message.index if message.known else None)
        case _:
            raise FrameError(f"{type(message).__name__} is not a message of Raft")


def _append(message: r.Append) -> Append:
    entries = tuple(map(decode_entry, message.entries))
    _check_numbers(message.term, message.prev_index, message.prev_term, message.commit)
    _check_term(message.term)
    term = message.prev_term
    for index, entry in enumerate(entries, message.prev_index + 1):
        if entry.index != index:
            raise FrameError(f"entry {entry.index} came where {index} should be")
        if not term <= entry.term <= message.term:
            raise FrameError(
                f"entry {index} is of term {entry.term}, after {term}, from a leader of {message.term}"
            )
        term = entry.term
    return Append(
        message.term, message.prev_index, message.prev_term, entries, message.commit, message.round
    )


def _install(message: r.Install) -> Install:
    snapshot = decode_snapshot(message.snapshot)
    _check_numbers(message.term, snapshot.index, snapshot.term)
    _check_term(message.term)
    if snapshot.data:
        raise FrameError("a piece of a snapshot came with the whole")
    if message.offset + len(message.data) > message.size:
        raise FrameError(
            f"{len(message.data)} bytes at {message.offset} of a snapshot that has {message.size}"
        )
    return Install(
        message.term, snapshot, message.offset, message.data, message.size, message.round
    )


def _check_numbers(*numbers: int) -> None:
    for number in numbers:
        if number >= MAX_NUMBER:
            raise FrameError(f"{number} is too large for a term or an index")


def _check_term(term: int) -> None:
    if not term:
        raise FrameError("a leader or candidate needs a term above 0")
