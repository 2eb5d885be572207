"""Keep a node's permanent identity in a file of its directory: its ID, and the cluster it belongs to.

Rules:

1. The ID is made at the first start. Addresses and names may change; the ID does not.
2. A node belongs to one cluster, or to none yet. Before its Raft log is begun, the file says with which members
   (`BEGINS`): after a crash it begins with the same. When the log exists, the node is a `MEMBER`. A member whose log is
   gone must not come back: it may have voted, and would not know.
3. The time for which nodes wait for a leader is kept here, too: it is known before the log is read, and is the same on
   all nodes. A leader's lease has to be shorter than every node's wait, which could not be ensured if each node had its
   own.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Final

from railgun.broker.errors import later_format, storage_error
from railgun.broker.log.disk import Disk, check_format, put, write_format
from railgun.errors import RailgunError
from railgun.storage.formats import Format

CLUSTER_FORMAT: Final = Format("railgun cluster", 1)
"""Format of the directory `cluster`: the node's identity, its Raft log, and the record of copies made."""
FILE: Final = "cluster/node.json"
ALONE: Final = "alone"
BEGINS: Final = "begins"
MEMBER: Final = "member"


class LostIdentityError(RailgunError):
    """The directory of a node is incomplete: the node must not come back under its name."""

    code: ClassVar[str] = "IDENTITY_LOST"


@dataclass(slots=True)
class NodeIdentity:
    """The identity of a node, as its directory has it."""

    id: str
    cluster: str = ""
    state: str = ALONE
    voters: list[str] = field(default_factory=list)
    """The voters with which the Raft log begins; empty: other nodes will tell them."""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    """What was known about other nodes at the last save."""
    election: float | None = None
    """Seconds for which all nodes of the cluster wait for a leader."""


def load(disk: Disk) -> NodeIdentity:
    """Return this node's identity, making and saving a new one in an empty directory. Raise `LostIdentityError` if
    the file cannot be read."""
    format_due = check_format(disk, "cluster", CLUSTER_FORMAT)
    disk.make_directory("cluster")
    if format_due:
        write_format(disk, "cluster", CLUSTER_FORMAT)
    if "node.json" not in disk.list("cluster"):
        identity = NodeIdentity(secrets.token_hex(8))
        save(disk, identity)
        return identity
    file = disk.open(FILE)
    try:
        stored = json.loads(file.read(0, 1 << 24))
        field_names = {field.name for field in fields(NodeIdentity)}
        if isinstance(stored, dict) and (unknown := stored.keys() - field_names):
            raise later_format(disk.where(FILE), f"it has {', '.join(sorted(unknown))}")
        return NodeIdentity(**stored)
    except (ValueError, TypeError) as error:
        raise LostIdentityError(
            f"{disk.where(FILE)} cannot be read: {error}. Restore it; or let this node join as a new one, with an "
            "empty directory, and remove the old one (railgun cluster remove)"
        ) from error
    finally:
        file.close()


def save(disk: Disk, identity: NodeIdentity) -> None:
    """Save an identity, durably when this returns. Raise `StorageError` if it cannot be written."""
    try:
        put(disk, f"{FILE}.new", [json.dumps(asdict(identity)).encode()]).close()
        disk.rename(f"{FILE}.new", FILE)
        disk.sync_directory("cluster")
    except OSError as error:
        raise storage_error(error, f"{disk.where(FILE)} cannot be written") from error
