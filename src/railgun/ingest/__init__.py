"""For programs outside of a flow: they push streams into it (`Connector`), or take what it writes (`SinkServer`).

Both exactly once. Loaded when they are asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from railgun.ingest.client import Connector
    from railgun.ingest.errors import (
        FeedError,
        NoFlowError,
        RefusedError,
        RewindError,
        TooLargeError,
    )
    from railgun.sinkserver.file_target import FileTarget
    from railgun.sinkserver.server import SinkServer
    from railgun.sinkserver.table_target import TableTarget
    from railgun.sinkserver.targets import BadRecordError, Records, Target, TargetError
    from railgun.ingest.sync import SyncConnector

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
_WHERE = {name: f"railgun.ingest.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'railgun.ingest' has no attribute {name!r}")
