"""What can go wrong with state on disk."""

from __future__ import annotations

from railgun.core.errors import RailgunError


class StateError(RailgunError):
    """State cannot be kept on disk, or not be read from it again."""
