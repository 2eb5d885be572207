"""Sources of flows, one file each, and the interfaces for your own: `Source`, `Reader`."""

from typing import TYPE_CHECKING

from railgun.lazy import lazy_names

if TYPE_CHECKING:
    from railgun.flows.errors import ConnectorError
    from railgun.flows.source import Reader, Source
    from railgun.sources.connectors import ConnectorMessage, Connectors
    from railgun.sources.directory import Directory
    from railgun.sources.generate import Generate
    from railgun.sources.items import Items
    from railgun.sources.streams import StreamMessage, Streams

__all__ = [
    "ConnectorError",
    "ConnectorMessage",
    "Connectors",
    "Directory",
    "Generate",
    "Items",
    "Reader",
    "Source",
    "StreamMessage",
    "Streams",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".connectors": (
            "ConnectorMessage",
            "Connectors",
        ),
        ".directory": ("Directory",),
        ".generate": ("Generate",),
        ".items": ("Items",),
        ".streams": (
            "StreamMessage",
            "Streams",
        ),
        "railgun.flows.source": (
            "Reader",
            "Source",
        ),
        "railgun.flows.errors": ("ConnectorError",),
    },
)
