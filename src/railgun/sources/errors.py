"""What can go wrong between a flow and the outside."""

from __future__ import annotations

from railgun.errors import RailgunError


class ConnectorError(RailgunError):
    """A source or sink was asked for something that cannot be, or found something it cannot go on with."""


class LostOutputError(ConnectorError):
    """What was prepared for a snapshot is neither where it was put nor where it was to go."""
