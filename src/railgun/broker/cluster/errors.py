"""What goes wrong with a cluster, and is told to clients."""

from __future__ import annotations

from typing import ClassVar

from railgun.errors import RailgunError


class ClusterError(RailgunError):
    """What the cluster says to a proposal; `code` is its word for it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class NotYetError(RailgunError):
    """This node is not a member yet: there is no cluster, or it has not heard of it."""

    code: ClassVar[str] = "NO_CLUSTER"


class RemovedError(RailgunError):
    """This node is no member of its cluster any more, and must not come back under its id."""

    code: ClassVar[str] = "REMOVED"
