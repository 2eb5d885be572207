"""Sources and sinks, one file each. `streams` and `outside` are imported when they are needed: they bring more."""

from typing import TYPE_CHECKING, Any

from railgun.connectors.collect import Collect
from railgun.connectors.directory import Directory
from railgun.connectors.errors import ConnectorError, LostOutputError
from railgun.connectors.files import Files
from railgun.connectors.generate import Generate
from railgun.connectors.items import Items
from railgun.connectors.parquet import Parquet
from railgun.connectors.printing import Print
from railgun.connectors.pushed import ConnectorMessage, Connectors

if TYPE_CHECKING:
    from railgun.connectors.outside import Outside

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
        from railgun.connectors.outside import Outside

        return Outside
    raise AttributeError(f"module 'railgun.connectors' has no attribute {name!r}")
