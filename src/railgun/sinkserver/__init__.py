"""A process outside of flows that writes their results to files or tables, exactly once (`railgun sink`)."""

from typing import TYPE_CHECKING

from railgun.lazy import lazy_names

if TYPE_CHECKING:
    from railgun.sinkserver.file_target import FileTarget
    from railgun.sinkserver.server import SinkServer
    from railgun.sinkserver.table_target import TableTarget
    from railgun.sinkserver.targets import BadRecordError, Records, Target, TargetError

__all__ = [
    "BadRecordError",
    "FileTarget",
    "Records",
    "SinkServer",
    "TableTarget",
    "Target",
    "TargetError",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".file_target": ("FileTarget",),
        ".server": ("SinkServer",),
        ".table_target": ("TableTarget",),
        ".targets": (
            "BadRecordError",
            "Records",
            "Target",
            "TargetError",
        ),
    },
)
