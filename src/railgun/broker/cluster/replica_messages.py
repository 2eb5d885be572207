"""Encode and decode the messages of `broker.protocol.replication` (`transport/proto/cluster.proto`)."""

from __future__ import annotations

from google.protobuf.message import Message

from railgun.broker.protocol.replication import messages as m
from railgun.broker.protocol.replication.standing import Runs, Standing
from railgun.errors import ProtocolError
from railgun.transport.proto import cluster_pb2 as n


def standing(stream: int, told: Standing) -> n.Standing:
    """How a copy stands.

    >>> standing_heard(standing(7, Standing(3, 0, 9, ((1, 5), (3, 9)), (3, 2))))
    Standing(label=3, first=0, end=9, runs=((1, 5), (3, 9)), groups=(3, 2))
    """
    return n.Standing(
        stream=stream,
        label=told.label,
        first=told.first,
        end=told.end,
        runs=[n.Run(epoch=epoch, end=end) for epoch, end in told.runs],
        group_epoch=told.groups[0],
        group_number=told.groups[1],
    )


def standing_heard(told: n.Standing) -> Standing:
    """How another node's copy stands."""
    runs = tuple((run.epoch, run.end) for run in told.runs)
    groups = (told.group_epoch, told.group_number)
    return Standing(told.label, told.first, told.end, runs, groups)


def push(stream: int, told: m.Push) -> n.Push:
    """For a replica; the batches go with it."""
    return n.Push(
        stream=stream,
        session=told.session,
        epoch=told.epoch,
        base=told.base,
        before=told.before,
        start=told.start,
        safe=told.safe,
        first=told.first,
        anew=told.anew,
        turn=told.turn,
    )


def push_heard(told: n.Push, runs: Runs) -> m.Push:
    """From the master, with batches of these epochs."""
    return m.Push(
        *(told.session, told.epoch, told.base, told.before, told.start, told.safe, told.first),
        *(told.anew, runs, told.turn),
    )


def push_groups(stream: int, told: m.PushGroups) -> n.PushGroups:
    """For a replica; the states or changes go with it."""
    return n.PushGroups(
        stream=stream,
        session=told.session,
        epoch=told.epoch,
        number=told.number,
        whole=told.whole,
        turn=told.turn,
    )


def push_groups_heard(told: n.PushGroups) -> m.PushGroups:
    """From the master."""
    return m.PushGroups(told.session, told.epoch, told.number, told.whole, told.turn)


def has_heard(told: n.Has) -> m.Has:
    """From a replica."""
    return m.Has(told.session, told.end, told.labelled, told.first)


def has_groups_heard(told: n.HasGroups) -> m.HasGroups:
    """From a replica."""
    return m.HasGroups(told.session, told.epoch, told.number)


def said(stream: int, told: m.Message) -> Message:
    """What a machine says by itself: nothing goes with it."""
    match told:
        case m.Has(session, end, labelled, first):
            return n.Has(stream=stream, session=session, end=end, labelled=labelled, first=first)
        case m.Stands(session, stands):
            return n.Stands(session=session, standing=standing(stream, stands))
        case m.Fetch(session, begin):
            return n.Fetch(stream=stream, session=session, begin=begin)
        case m.FetchGroups(session):
            return n.FetchGroups(stream=stream, session=session)
        case m.HasGroups(session, epoch, number):
            return n.HasGroups(stream=stream, session=session, epoch=epoch, number=number)
        case _:
            raise ProtocolError(f"{type(told).__name__} does not travel alone")
