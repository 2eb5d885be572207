"""What nodes say to each other to agree, and what they keep of it, as protobuf (`proto/raft.proto`).

Rules:

1. Every message of `broker.protocol.raft.messages` comes back as it was; so do entries, hard states and snapshots.
2. The machine trusts its peers to say what Raft has them say. What no node says that keeps the rules of form is
   refused here, as a `FrameError`: entries that do not follow each other, a piece that lies outside of its snapshot,
   a leader without a term, numbers that no log will ever reach.
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

Spoken: TypeAlias = (
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
MOST: Final = 1 << 62
"""Terms and indexes stay below it: one may be added to them many times."""


# ---------------------------------------------------------------- what is kept


def encode_members(members: Members) -> r.Members:
    """Who takes part."""
    return r.Members(voters=members.voters, learners=members.learners)


def decode_members(told: r.Members) -> Members:
    """Who takes part."""
    return Members(tuple(told.voters), tuple(told.learners))


def encode_entry(entry: Entry) -> r.Entry:
    """One line of the log.

    >>> decode_entry(encode_entry(Entry(7, 2, b"x", Members(("a",)))))
    Entry(index=7, term=2, data=b'x', members=Members(voters=('a',), learners=()))
    """
    members = None if entry.members is None else encode_members(entry.members)
    return r.Entry(index=entry.index, term=entry.term, data=entry.data, members=members)


def decode_entry(told: r.Entry) -> Entry:
    """One line of the log."""
    members = decode_members(told.members) if told.HasField("members") else None
    return Entry(told.index, told.term, told.data, members)


def encode_hard(hard: Hard) -> r.Hard:
    """The term and the vote."""
    return r.Hard(term=hard.term, vote=hard.vote or "")


def decode_hard(told: r.Hard) -> Hard:
    """The term and the vote."""
    return Hard(told.term, told.vote or None)


def encode_snapshot(snapshot: Snapshot) -> r.Snapshot:
    """All that was applied up to an index."""
    return r.Snapshot(
        index=snapshot.index,
        term=snapshot.term,
        members=encode_members(snapshot.members),
        data=snapshot.data,
    )


def decode_snapshot(told: r.Snapshot) -> Snapshot:
    """All that was applied up to an index."""
    return Snapshot(told.index, told.term, decode_members(told.members), told.data)


# ---------------------------------------------------------------- what nodes say


def encode_message(message: Message) -> Spoken:
    """A message, for the wire.

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


def decode_message(told: Any) -> Message:
    """A message that came; `FrameError` if no node says that."""
    match told:
        case r.Append():
            return _append(told)
        case r.Appended():
            _check_numbers(told.term, told.index, told.hint_term)
            return Appended(told.term, told.ok, told.index, told.round, told.hint, told.hint_term)
        case r.AskVote():
            _check_numbers(told.term, told.last_index, told.last_term)
            _check_term(told.term)
            return AskVote(told.term, told.last_index, told.last_term, told.pre, told.transfer)
        case r.Vote():
            _check_numbers(told.term)
            return Vote(told.term, told.granted, told.pre)
        case r.Install():
            return _install(told)
        case r.Installing():
            _check_numbers(told.term, told.index)
            return Installing(told.term, told.index, told.offset, told.round)
        case r.Campaign():
            _check_numbers(told.term)
            _check_term(told.term)
            return Campaign(told.term)
        case r.AskRead():
            _check_numbers(told.term)
            return AskRead(told.term, told.number)
        case r.ReadAt():
            _check_numbers(told.term, told.index)
            return ReadAt(told.term, told.number, told.index if told.known else None)
        case _:
            raise FrameError(f"{type(told).__name__} is nothing that Raft says")


def _append(told: r.Append) -> Append:
    entries = tuple(map(decode_entry, told.entries))
    _check_numbers(told.term, told.prev_index, told.prev_term, told.commit)
    _check_term(told.term)
    term = told.prev_term
    for at, entry in enumerate(entries, told.prev_index + 1):
        if entry.index != at:
            raise FrameError(f"entry {entry.index} came where {at} should be")
        if not term <= entry.term <= told.term:
            raise FrameError(
                f"entry {at} is of term {entry.term}, after {term}, from a leader of {told.term}"
            )
        term = entry.term
    return Append(told.term, told.prev_index, told.prev_term, entries, told.commit, told.round)


def _install(told: r.Install) -> Install:
    snapshot = decode_snapshot(told.snapshot)
    _check_numbers(told.term, snapshot.index, snapshot.term)
    _check_term(told.term)
    if snapshot.data:
        raise FrameError("a piece of a snapshot came with the whole")
    if told.offset + len(told.data) > told.size:
        raise FrameError(
            f"{len(told.data)} bytes at {told.offset} of a snapshot that has {told.size}"
        )
    return Install(told.term, snapshot, told.offset, told.data, told.size, told.round)


def _check_numbers(*numbers: int) -> None:
    for number in numbers:
        if number >= MOST:
            raise FrameError(f"there is no term and no index {number}")


def _check_term(term: int) -> None:
    if not term:
        raise FrameError("who leads, or wants to, has a term")
