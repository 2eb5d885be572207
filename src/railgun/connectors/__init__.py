"""Sources and sinks, one file each."""

from railgun.connectors.collect import Collect
from railgun.connectors.directory import Directory
from railgun.connectors.errors import ConnectorError, LostOutputError
from railgun.connectors.files import Files
from railgun.connectors.generate import Generate
from railgun.connectors.items import Items
from railgun.connectors.parquet import Parquet
from railgun.connectors.printing import Print
from railgun.connectors.streams import StreamMessage, Streams, StreamSink

__all__ = [
    "Collect",
    "ConnectorError",
    "Directory",
    "Files",
    "Generate",
    "Items",
    "LostOutputError",
    "Parquet",
    "Print",
    "StreamMessage",
    "StreamSink",
    "Streams",
]
