"""For programs outside of a flow: sinks that take what a flow writes, exactly once. Loaded when they are asked for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from railgun.connector.file_target import FileTarget
    from railgun.connector.sink_server import SinkServer
    from railgun.connector.table_target import TableTarget
    from railgun.connector.targets import BadRecordError, Records, Target, TargetError

__all__ = [
    "BadRecordError",
    "FileTarget",
    "Records",
    "SinkServer",
    "TableTarget",
    "Target",
    "TargetError",
]

_WHERE = {
    "FileTarget": "railgun.connector.file_target",
    "SinkServer": "railgun.connector.sink_server",
    "TableTarget": "railgun.connector.table_target",
    **dict.fromkeys(
        ("BadRecordError", "Records", "Target", "TargetError"), "railgun.connector.targets"
    ),
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'railgun.connector' has no attribute {name!r}")
