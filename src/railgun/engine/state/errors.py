"""Errors of state that is kept on disk."""

from __future__ import annotations

from railgun.errors import RailgunError
from railgun.transport.columns import EncodingError


class StateError(RailgunError):
    """State cannot be written to disk, or cannot be read back."""


class UnpicklableStateError(StateError, EncodingError):
    """State cannot be kept on disk because pickle refuses it; a retry would fail again."""
