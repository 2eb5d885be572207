"""The error codes of nodes and clients, and whether an error with each code is transient.

This table is the only place that decides which requests are worth a retry. Clients, sources and sinks of flows, Spark's
source and sink and the command line query it (`may_pass`, `nothing_done`, `resent`, `no_node`).

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
    """What an error code says about the request that failed."""

    passes: bool
    """Whether the error is transient: the same request may succeed later, unchanged."""
    nothing_done: bool
    """Whether the request has had no effect. False: it may have been carried out or not."""
    resent: bool = False
    """Whether a client repeats the request by itself until its deadline: the cause is a change of nodes or roles."""
    no_node: bool = False
    """Whether no node could be reached that can serve the request: commands end with the exit code for that."""


def _no_node(code: Code) -> Code:
    return code._replace(no_node=True)


_FINAL: Final = Code(passes=False, nothing_done=True)
_FINAL_IN_DOUBT: Final = Code(passes=False, nothing_done=False)
_TRANSIENT: Final = Code(passes=True, nothing_done=True)
_TRANSIENT_IN_DOUBT: Final = Code(passes=True, nothing_done=False)
_RESENT: Final = Code(passes=True, nothing_done=True, resent=True)
_RESENT_IN_DOUBT: Final = Code(passes=True, nothing_done=False, resent=True)

CODES: Final[dict[str, Code]] = {
    # Nodes come and go, and change their roles.
    "NO_MASTER": _no_node(_RESENT), "STOPPING": _RESENT, "DEPOSED": _no_node(_RESENT_IN_DOUBT),
    "NO_LEADER": _no_node(_TRANSIENT_IN_DOUBT), "NOT_LEADER": _TRANSIENT, "NOT_READY": _TRANSIENT,
    "FATE_UNKNOWN": _TRANSIENT_IN_DOUBT, "NO_CLUSTER": _TRANSIENT, "NOT_FORMED": _TRANSIENT,
    "UNREACHABLE": _TRANSIENT_IN_DOUBT, "COPY_BEHIND": _RESENT,
    # The connection between a client and its node.
    "CONNECTION_LOST": _no_node(_TRANSIENT_IN_DOUBT), "DEADLINE": _no_node(_TRANSIENT_IN_DOUBT),
    "NO_NODE": _no_node(_TRANSIENT), "CLOSED": _no_node(_TRANSIENT),
    "BAD_HELLO": _TRANSIENT, "BAD_SECRET": _FINAL, "BAD_VERSION": _FINAL, "NO_TLS": _FINAL, "TLS": _FINAL,
    "OTHER_CLUSTER": _FINAL, "OTHER_NODE": _FINAL,
    # Disks, and the deduplication window.
    "NOT_ENOUGH_REPLICAS": _TRANSIENT, "NOT_ENOUGH_REPLICAS_AFTER_APPEND": _TRANSIENT_IN_DOUBT,
    "NO_SPACE": _TRANSIENT, "STORAGE": _TRANSIENT_IN_DOUBT, "LOG_FAILED": _TRANSIENT_IN_DOUBT,
    "ID_POOL_FULL": _TRANSIENT,
    "DUPLICATE_ID": _FINAL, "LOG_DAMAGED": _FINAL, "WAL_DAMAGED": _FINAL, "OUT_OF_ORDER": _FINAL, "TRIMMED": _FINAL,
    "BEYOND_END": _FINAL, "LATER_VERSION": _FINAL, "NO_GRAVE": _FINAL, "IDENTITY_LOST": _FINAL,
    # Producers.
    "PRODUCER_BUSY": _RESENT, "STAGE_GAP": _TRANSIENT, "FENCED": _FINAL, "NO_PRODUCER": _FINAL, "LOST_OUTPUT": _FINAL,
    "SEQUENCE_OVER": _FINAL, "LABEL_FORGOTTEN": _FINAL, "STAGING_FULL": _FINAL, "NOTES_DAMAGED": _FINAL,
    "PRODUCER": _FINAL,
    # Requests: no listener answers now, but one may later.
    "NO_CONSUMERS": _TRANSIENT, "CONSUMERS_BUSY": _TRANSIENT, "RS_TIMEOUT": _TRANSIENT_IN_DOUBT,
    "RS_EXISTS": _FINAL, "RS_GONE": _FINAL,
    # The request is invalid, or does not fit the stream, group or subscription.
    "NO_STREAM": _FINAL, "NO_GROUP": _FINAL, "NO_SUBSCRIPTION": _FINAL, "NOT_PERSISTENT": _FINAL,
    "NOT_EPHEMERAL": _FINAL, "STREAM_REPLACED": _FINAL, "OFFSET_OUT_OF_RANGE": _FINAL, "DIFFERS": _FINAL,
    "BAD_SETTINGS": _FINAL, "BAD_REQUEST": _FINAL, "BAD_FRAME": _FINAL, "BAD_CHANNEL": _FINAL, "BAD_TOPIC": _FINAL,
    "BAD_MATCHER": _FINAL, "BAD_RANGE": _FINAL, "BAD_DELAY": _FINAL, "BAD_CREDIT": _FINAL, "BAD_GROUP_CONFIG": _FINAL,
    "BAD_PAYLOAD": _FINAL, "TOO_LARGE": _FINAL, "ACK_STALE": _FINAL, "NO_ACKS": _FINAL, "NOT_A_READER": _FINAL,
    "NOT_MEMBER": _FINAL, "MEMBER_EXISTS": _FINAL, "ALREADY_MEMBER": _FINAL, "GROUP_BUSY": _FINAL,
    "GROUP_KIND": _FINAL, "CONSUMER_TAKEN": _FINAL, "WOULD_EXPIRE": _FINAL,
    # Calls about the cluster, and errors of a node itself.
    "UNKNOWN_NODE": _FINAL, "NO_REGION": _FINAL, "BAD_REGION": _FINAL, "NOT_ELIGIBLE": _FINAL, "STILL_IN_USE": _FINAL,
    "IS_MEMBER": _FINAL, "NAME_TAKEN": _FINAL, "NOT_ACTIVE": _FINAL, "NOT_LEARNING": _FINAL, "NOT_VOTING": _FINAL,
    "BAD_COMMAND": _FINAL, "TOO_MANY": _FINAL, "NO_CALL": _FINAL, "NO_VOTER": _FINAL, "NO_VOTERS": _FINAL,
    "STALE": _FINAL, "REMOVED": _FINAL, "INTERNAL": _FINAL_IN_DOUBT, "IN_USE": _FINAL, "PORT_TAKEN": _FINAL,
    "BAD_CLUSTER": _FINAL, "CANNOT_JOIN": _FINAL, "DISCOVERY": _TRANSIENT, "BAD_DISCOVERY": _FINAL,
}  # fmt: skip


def may_pass(code: str) -> bool:
    """Return whether a request that failed with `code` may succeed later; False for an unknown code."""
    return CODES.get(code, _FINAL_IN_DOUBT).passes


def nothing_done(code: str) -> bool:
    """Return whether a request that failed with `code` is known to have had no effect."""
    return CODES.get(code, _FINAL_IN_DOUBT).nothing_done


def no_node(code: str) -> bool:
    """Return whether `code` says that no node could be reached that can serve the request."""
    return CODES.get(code, _FINAL_IN_DOUBT).no_node


def resent(code: str) -> bool:
    """Return whether a client by itself repeats a request that failed with `code`, until its deadline."""
    return CODES.get(code, _FINAL_IN_DOUBT).resent
