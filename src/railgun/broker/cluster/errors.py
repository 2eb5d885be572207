"""Errors of a cluster that are sent to clients."""

from __future__ import annotations

from typing import ClassVar

from railgun.errors import RailgunError


class ClusterError(RailgunError):
    """A proposal was refused by the cluster; `code` is the cluster's code for the reason."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class NotYetError(RailgunError):
    """This node is not a member of a cluster yet: there is none, or no cluster has let it in."""

    code: ClassVar[str] = "NO_CLUSTER"


class RemovedError(RailgunError):
    """This node was removed from its cluster, and must not come back under its ID."""

    code: ClassVar[str] = "REMOVED"
