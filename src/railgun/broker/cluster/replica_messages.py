"""Encode and decode the messages of `broker.protocol.replication` (`transport/proto/cluster.proto`)."""

from __future__ import annotations

from google.protobuf.message import Message

from railgun.broker.protocol.replication import messages as m
from railgun.broker.protocol.replication.standing import Runs, Standing
from railgun.errors import ProtocolError
from railgun.transport.proto import cluster_pb2 as n


def encode_standing(stream: int, value: Standing) -> n.Standing:
    """Encode the standing of a copy of `stream`.

    >>> decode_standing(encode_standing(7, Standing(3, 0, 9, ((1, 5), (3, 9)), (3, 2))))
    Standing(label=3, first=0, end=9, runs=((1, 5), (3, 9)), groups=(3, 2))
    """
    return n.Standing(
        stream=stream,
        label=value.label,
        first=value.first,
        end=value.end,
        runs=[n.Run(epoch=epoch, end=end) for epoch, end in value.runs],
        group_epoch=value.groups[0],
        group_number=value.groups[1],
    )


def decode_standing(message: n.Standing) -> Standing:
    """Decode the standing of another node's copy."""
    runs = tuple((run.epoch, run.end) for run in message.runs)
    groups = (message.group_epoch, message.group_number)
    return Standing(message.label, message.first, message.end, runs, groups)


def encode_push(stream: int, message: m.Push) -> n.Push:
    """Encode a push to a replica; the batches travel beside it."""
    return n.Push(
        stream=stream,
        session=message.session,
        epoch=message.epoch,
        base=message.base,
        before=message.before,
        start=message.start,
        safe=message.safe,
        first=message.first,
        anew=message.anew,
        turn=message.turn,
    )


def decode_push(message: n.Push, runs: Runs) -> m.Push:
    """Decode a push from the master, whose batches have the epochs `runs`."""
    return m.Push(
        *(
            message.session,
            message.epoch,
            message.base,
            message.before,
            message.start,
            message.safe,
            message.first,
        ),
        *(message.anew, runs, message.turn),
    )


def encode_push_groups(stream: int, message: m.PushGroups) -> n.PushGroups:
    """Encode a push of groups to a replica; their states or changes travel beside it."""
    return n.PushGroups(
        stream=stream,
        session=message.session,
        epoch=message.epoch,
        number=message.number,
        whole=message.whole,
        turn=message.turn,
    )


def decode_push_groups(message: n.PushGroups) -> m.PushGroups:
    """Decode a push of groups from the master."""
    return m.PushGroups(message.session, message.epoch, message.number, message.whole, message.turn)


def decode_has(message: n.Has) -> m.Has:
    """Decode a replica's report of the messages it has."""
    return m.Has(message.session, message.end, message.labelled, message.first)


def decode_has_groups(message: n.HasGroups) -> m.HasGroups:
    """Decode a replica's report of the groups it has."""
    return m.HasGroups(message.session, message.epoch, message.number)


def encode(stream: int, message: m.Message) -> Message:
    """Encode a message that travels without data. Raise `ProtocolError` for any other."""
    match message:
        case m.Has(session, end, labelled, first):
            return n.Has(stream=stream, session=session, end=end, labelled=labelled, first=first)
        case m.Stands(session, stands):
            return n.Stands(session=session, standing=encode_standing(stream, stands))
        case m.Fetch(session, begin):
            return n.Fetch(stream=stream, session=session, begin=begin)
        case m.FetchGroups(session):
            return n.FetchGroups(stream=stream, session=session)
        case m.HasGroups(session, epoch, number):
            return n.HasGroups(stream=stream, session=session, epoch=epoch, number=number)
        case _:
            raise ProtocolError(f"{type(message).__name__} does not travel alone")
