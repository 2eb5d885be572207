"""For programs outside of a flow: they push streams into it (`Connector`), or take what it writes (`SinkServer`).

Both exactly once. Loaded when they are asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from railgun.connector.client import Connector
    from railgun.connector.errors import (
        FeedError,
        NoFlowError,
        RefusedError,
        RewindError,
        TooLargeError,
    )
    from railgun.connector.sinks.file_target import FileTarget
    from railgun.connector.sinks.server import SinkServer
    from railgun.connector.sinks.table_target import TableTarget
    from railgun.connector.sinks.targets import BadRecordError, Records, Target, TargetError
    from railgun.connector.sync import SyncConnector

__all__ = [
    "BadRecordError",
    "Connector",
    "FeedError",
    "FileTarget",
    "NoFlowError",
    "Records",
    "RefusedError",
    "RewindError",
    "SinkServer",
    "SyncConnector",
    "TableTarget",
    "Target",
    "TargetError",
    "TooLargeError",
]

_NAMES = {
    "client": ("Connector",),
    "sync": ("SyncConnector",),
    "errors": ("FeedError", "NoFlowError", "RefusedError", "RewindError", "TooLargeError"),
    "sinks.file_target": ("FileTarget",),
    "sinks.server": ("SinkServer",),
    "sinks.table_target": ("TableTarget",),
    "sinks.targets": ("BadRecordError", "Records", "Target", "TargetError"),
}
_WHERE = {name: f"railgun.connector.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'railgun.connector' has no attribute {name!r}")
