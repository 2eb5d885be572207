"""Sources and sinks, one file each. `streams` is imported when it is needed: it brings a client with it."""

from railgun.connectors.collect import Collect
from railgun.connectors.directory import Directory
from railgun.connectors.errors import ConnectorError, LostOutputError
from railgun.connectors.files import Files
from railgun.connectors.generate import Generate
from railgun.connectors.items import Items
from railgun.connectors.parquet import Parquet
from railgun.connectors.printing import Print
from railgun.connectors.pushed import ConnectorMessage, Connectors

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
    "Parquet",
    "Print",
]
