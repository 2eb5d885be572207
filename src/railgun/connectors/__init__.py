"""Sources and sinks, one file each. `streams` and `outside` are imported when they are needed: they bring more."""

from typing import TYPE_CHECKING, Any

from railgun.sinks.collect import Collect
from railgun.sources.directory import Directory
from railgun.sources.errors import ConnectorError, LostOutputError
from railgun.sinks.files import Files
from railgun.sources.generate import Generate
from railgun.sources.items import Items
from railgun.sinks.parquet import Parquet
from railgun.sinks.printing import Print
from railgun.sources.connectors import ConnectorMessage, Connectors

if TYPE_CHECKING:
    from railgun.sinks.external import Outside

__all__ = [
    "Collect",
    "ConnectorError",
    "ConnectorMessage",
    "Connectors",
    "Directory",
    "Files",
    "Generate",
    "Items",
    "LostOutputError",
    "Outside",
    "Parquet",
    "Print",
]


def __getattr__(name: str) -> Any:
    if name == "Outside":
        from railgun.sinks.external import Outside

        return Outside
    raise AttributeError(f"module 'railgun.connectors' has no attribute {name!r}")
