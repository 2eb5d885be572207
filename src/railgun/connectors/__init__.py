"""Sources and sinks, one file each."""

from railgun.connectors.collect import Collect
from railgun.connectors.items import Items

__all__ = ["Collect", "Items"]
