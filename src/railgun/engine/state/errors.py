"""What can go wrong with state on disk."""

from __future__ import annotations

from railgun.errors import RailgunError
from railgun.transport.columns import EncodingError


class StateError(RailgunError):
    """State cannot be kept on disk, or not be read from it again."""


class UnpicklableStateError(StateError, EncodingError):
    """State cannot be kept on disk: pickle refuses it, and would again."""
