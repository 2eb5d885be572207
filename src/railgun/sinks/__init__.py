"""Sinks of flows, one file each, and the interfaces for your own: `Sink`, `TwoPhaseSink`."""

from typing import TYPE_CHECKING

from railgun.lazy import lazy_names

if TYPE_CHECKING:
    from railgun.flows.errors import ConnectorError, LostOutputError
    from railgun.flows.sink import Place, Sink, TwoPhaseSink, TwoPhaseWriter, Writer
    from railgun.sinks.collect import Collect
    from railgun.sinks.external import Outside
    from railgun.sinks.files import Files
    from railgun.sinks.parquet import Parquet
    from railgun.sinks.printing import Print
    from railgun.sinks.streams import StreamSink

__all__ = [
    "Collect",
    "ConnectorError",
    "Files",
    "LostOutputError",
    "Outside",
    "Parquet",
    "Place",
    "Print",
    "Sink",
    "StreamSink",
    "TwoPhaseSink",
    "TwoPhaseWriter",
    "Writer",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".collect": ("Collect",),
        ".external": ("Outside",),
        ".files": ("Files",),
        ".parquet": ("Parquet",),
        ".printing": ("Print",),
        ".streams": ("StreamSink",),
        "railgun.flows.sink": (
            "Place",
            "Sink",
            "TwoPhaseSink",
            "TwoPhaseWriter",
            "Writer",
        ),
        "railgun.flows.errors": (
            "ConnectorError",
            "LostOutputError",
        ),
    },
)
