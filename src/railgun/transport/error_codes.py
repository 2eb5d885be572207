"""The codes of errors that nodes and clients give, and whether an error with that code may pass.

This table is the only place that decides what is worth another try. Clients, the ends of flows, Spark's source and sink
and the command line ask it (`may_pass`, `nothing_done`, `resent`, `no_node`).

>>> may_pass("NO_LEADER"), may_pass("BAD_REQUEST"), may_pass("A_CODE_OF_A_LATER_VERSION")
(True, False, False)
>>> nothing_done("NO_MASTER"), nothing_done("DEPOSED")
(True, False)
>>> no_node("CONNECTION_LOST"), no_node("NO_STREAM")
(True, False)
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Code(NamedTuple):
    """What a code says of the request that failed."""

    passes: bool
    """Whether the same request may succeed later, though nobody changes it."""
    nothing_done: bool
    """Whether the request has had no effect. False: it may have been done or not."""
    resent: bool = False
    """Whether a client repeats the request by itself until its deadline: the cause is a change of nodes or roles."""
    no_node: bool = False
    """Whether no node was there that could have done it: commands end with the exit code for that."""


def _no_node(code: Code) -> Code:
    return code._replace(no_node=True)


_LASTS: Final = Code(passes=False, nothing_done=True)
_LASTS_IN_DOUBT: Final = Code(passes=False, nothing_done=False)
_PASSES: Final = Code(passes=True, nothing_done=True)
_PASSES_IN_DOUBT: Final = Code(passes=True, nothing_done=False)
_RESENT: Final = Code(passes=True, nothing_done=True, resent=True)
_RESENT_IN_DOUBT: Final = Code(passes=True, nothing_done=False, resent=True)

CODES: Final[dict[str, Code]] = {
    # Nodes come and go, and change their roles.
    "NO_MASTER": _no_node(_RESENT), "STOPPING": _RESENT, "DEPOSED": _no_node(_RESENT_IN_DOUBT),
    "NO_LEADER": _no_node(_PASSES_IN_DOUBT), "NOT_LEADER": _PASSES, "NOT_READY": _PASSES,
    "FATE_UNKNOWN": _PASSES_IN_DOUBT, "NO_CLUSTER": _PASSES, "NOT_FORMED": _PASSES, "UNREACHABLE": _PASSES_IN_DOUBT,
    "COPY_BEHIND": _RESENT,
    # The connection between a client and its node.
    "CONNECTION_LOST": _no_node(_PASSES_IN_DOUBT), "DEADLINE": _no_node(_PASSES_IN_DOUBT),
    "NO_NODE": _no_node(_PASSES), "CLOSED": _no_node(_PASSES),
    "BAD_HELLO": _PASSES, "BAD_SECRET": _LASTS, "BAD_VERSION": _LASTS, "NO_TLS": _LASTS, "TLS": _LASTS,
    "OTHER_CLUSTER": _LASTS, "OTHER_NODE": _LASTS,
    # Disks, and what is remembered of IDs.
    "NOT_ENOUGH_REPLICAS": _PASSES, "NOT_ENOUGH_REPLICAS_AFTER_APPEND": _PASSES_IN_DOUBT,
    "NO_SPACE": _PASSES, "STORAGE": _PASSES_IN_DOUBT, "LOG_FAILED": _PASSES_IN_DOUBT, "ID_POOL_FULL": _PASSES,
    "DUPLICATE_ID": _LASTS, "LOG_DAMAGED": _LASTS, "WAL_DAMAGED": _LASTS, "OUT_OF_ORDER": _LASTS, "TRIMMED": _LASTS,
    "BEYOND_END": _LASTS, "LATER_VERSION": _LASTS, "NO_GRAVE": _LASTS, "IDENTITY_LOST": _LASTS,
    # Producers.
    "PRODUCER_BUSY": _RESENT, "STAGE_GAP": _PASSES, "FENCED": _LASTS, "NO_PRODUCER": _LASTS, "LOST_OUTPUT": _LASTS,
    "SEQUENCE_OVER": _LASTS, "LABEL_FORGOTTEN": _LASTS, "STAGING_FULL": _LASTS, "NOTES_DAMAGED": _LASTS,
    "PRODUCER": _LASTS,
    # Requests: nobody answers now, but may later.
    "NO_CONSUMERS": _PASSES, "CONSUMERS_BUSY": _PASSES, "RS_TIMEOUT": _PASSES_IN_DOUBT,
    "RS_EXISTS": _LASTS, "RS_GONE": _LASTS,
    # What was asked for is wrong, or is not so.
    "NO_STREAM": _LASTS, "NO_GROUP": _LASTS, "NO_SUBSCRIPTION": _LASTS, "NOT_PERSISTENT": _LASTS,
    "NOT_EPHEMERAL": _LASTS, "STREAM_REPLACED": _LASTS, "OFFSET_OUT_OF_RANGE": _LASTS, "DIFFERS": _LASTS,
    "BAD_SETTINGS": _LASTS, "BAD_REQUEST": _LASTS, "BAD_FRAME": _LASTS, "BAD_CHANNEL": _LASTS, "BAD_TOPIC": _LASTS,
    "BAD_MATCHER": _LASTS, "BAD_RANGE": _LASTS, "BAD_DELAY": _LASTS, "BAD_CREDIT": _LASTS, "BAD_GROUP_CONFIG": _LASTS,
    "BAD_PAYLOAD": _LASTS, "TOO_LARGE": _LASTS, "ACK_STALE": _LASTS, "NO_ACKS": _LASTS, "NOT_A_READER": _LASTS,
    "NOT_MEMBER": _LASTS, "MEMBER_EXISTS": _LASTS, "ALREADY_MEMBER": _LASTS, "GROUP_BUSY": _LASTS,
    "GROUP_KIND": _LASTS, "CONSUMER_TAKEN": _LASTS, "WOULD_EXPIRE": _LASTS,
    # Calls about the cluster, and errors of a node itself.
    "UNKNOWN_NODE": _LASTS, "NO_REGION": _LASTS, "BAD_REGION": _LASTS, "NOT_ELIGIBLE": _LASTS, "STILL_IN_USE": _LASTS,
    "IS_MEMBER": _LASTS, "NAME_TAKEN": _LASTS, "NOT_ACTIVE": _LASTS, "NOT_LEARNING": _LASTS, "NOT_VOTING": _LASTS,
    "BAD_COMMAND": _LASTS, "TOO_MANY": _LASTS, "NO_CALL": _LASTS, "NO_VOTER": _LASTS, "NO_VOTERS": _LASTS,
    "STALE": _LASTS, "REMOVED": _LASTS, "INTERNAL": _LASTS_IN_DOUBT, "IN_USE": _LASTS, "PORT_TAKEN": _LASTS,
    "BAD_CLUSTER": _LASTS, "CANNOT_JOIN": _LASTS, "DISCOVERY": _PASSES, "BAD_DISCOVERY": _LASTS,
}  # fmt: skip


def may_pass(code: str) -> bool:
    """Return whether a request that failed with `code` may succeed later. A code that is not known does not."""
    return CODES.get(code, _LASTS_IN_DOUBT).passes


def nothing_done(code: str) -> bool:
    """Return whether a request that failed with `code` is known to have had no effect."""
    return CODES.get(code, _LASTS_IN_DOUBT).nothing_done


def no_node(code: str) -> bool:
    """Return whether `code` says that no node was there that could have done what was asked for."""
    return CODES.get(code, _LASTS_IN_DOUBT).no_node


def resent(code: str) -> bool:
    """Return whether a client repeats what failed with `code` by itself, until its deadline."""
    return CODES.get(code, _LASTS_IN_DOUBT).resent
