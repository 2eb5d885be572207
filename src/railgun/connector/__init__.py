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
    from railgun.connector.file_target import FileTarget
    from railgun.connector.sink_server import SinkServer
    from railgun.connector.sync import SyncConnector
    from railgun.connector.table_target import TableTarget
    from railgun.connector.targets import BadRecordError, Records, Target, TargetError

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
    "errors": ("FeedError", "NoFlowError", "RefusedError", "RewindError", "TooLargeError"),
    "file_target": ("FileTarget",),
    "sink_server": ("SinkServer",),
    "sync": ("SyncConnector",),
    "table_target": ("TableTarget",),
    "targets": ("BadRecordError", "Records", "Target", "TargetError"),
}
_WHERE = {name: f"railgun.connector.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'railgun.connector' has no attribute {name!r}")
