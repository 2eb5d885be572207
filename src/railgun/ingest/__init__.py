"""Push streams of messages into a flow from another program, exactly once: `Connector`, `SyncConnector`."""

from typing import TYPE_CHECKING

from railgun.lazy import lazy_names

if TYPE_CHECKING:
    from railgun.ingest.client import Connector
    from railgun.ingest.errors import (
        FeedError,
        NoFlowError,
        RefusedError,
        RewindError,
        TooLargeError,
    )
    from railgun.ingest.sync import SyncConnector

__all__ = [
    "Connector",
    "FeedError",
    "NoFlowError",
    "RefusedError",
    "RewindError",
    "SyncConnector",
    "TooLargeError",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".client": ("Connector",),
        ".sync": ("SyncConnector",),
        ".errors": (
            "FeedError",
            "NoFlowError",
            "RefusedError",
            "RewindError",
            "TooLargeError",
        ),
    },
)
