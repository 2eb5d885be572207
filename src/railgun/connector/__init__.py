"""Programs outside a flow: they push streams into it (`Connector`), exactly once."""

from railgun.connector.client import Connector
from railgun.connector.errors import (
    FeedError,
    NoFlowError,
    RefusedError,
    RewindError,
    TooLargeError,
)
from railgun.connector.sync import SyncConnector

__all__ = [
    "Connector",
    "FeedError",
    "NoFlowError",
    "RefusedError",
    "RewindError",
    "SyncConnector",
    "TooLargeError",
]
