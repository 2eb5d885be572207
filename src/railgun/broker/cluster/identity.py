"""Who a node is, for ever: its id, and the cluster it belongs to, in a file of its directory.

Rules:

1. The id is made at the first start. Addresses and names may change; the id does not.
2. A node belongs to one cluster, or to none yet. Before its log of Raft is begun, the file says what it begins with
   (`BEGINS`): after a crash it begins with the same. When the log is there, it is a `MEMBER`. A member whose log is
   gone must not come back: it may have voted, and would not know.
3. How long nodes wait for a leader is kept here, too: it is known before the log is read, and is the same on all
   nodes. A leader's lease is shorter than everybody's wait, and nobody could say so if each had its own.
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
"""Of the directory `cluster`: who the node is, its Raft log, and which copies were made."""
FILE: Final = "cluster/node.json"
ALONE: Final = "alone"
BEGINS: Final = "begins"
MEMBER: Final = "member"


class LostIdentityError(RailgunError):
    """The directory of a node is not whole: it must not come back under its name."""

    code: ClassVar[str] = "IDENTITY_LOST"


@dataclass(slots=True)
class Who:
    """A node, as its directory knows it."""

    id: str
    cluster: str = ""
    state: str = ALONE
    voters: list[str] = field(default_factory=list)
    """With whom the log of Raft begins; none: others will tell."""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    """What was known of other nodes when it was formed."""
    election: float | None = None
    """How long it waits for a leader, as all nodes of its cluster do."""


def load(disk: Disk) -> Who:
    """Who this node is; a new one, if the directory does not know."""
    format_due = check_format(disk, "cluster", CLUSTER_FORMAT)
    disk.make_directory("cluster")
    if format_due:
        write_format(disk, "cluster", CLUSTER_FORMAT)
    if "node.json" not in disk.list("cluster"):
        who = Who(secrets.token_hex(8))
        save(disk, who)
        return who
    file = disk.open(FILE)
    try:
        told = json.loads(file.read(0, 1 << 24))
        known = {field.name for field in fields(Who)}
        if isinstance(told, dict) and (unknown := told.keys() - known):
            raise later_format(disk.where(FILE), f"it has {', '.join(sorted(unknown))}")
        return Who(**told)
    except (ValueError, TypeError) as error:
        raise LostIdentityError(
            f"{disk.where(FILE)} cannot be read: {error}. Restore it; or let this node join as a new one, with an "
            "empty directory, and remove the old one (railgun cluster remove)"
        ) from error
    finally:
        file.close()


def save(disk: Disk, who: Who) -> None:
    """Keep it, for good when it returns."""
    try:
        put(disk, f"{FILE}.new", [json.dumps(asdict(who)).encode()]).close()
        disk.rename(f"{FILE}.new", FILE)
        disk.sync_directory("cluster")
    except OSError as error:
        raise storage_error(error, f"{disk.where(FILE)} cannot be written") from error
