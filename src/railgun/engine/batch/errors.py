"""What can be wrong with a batch run."""

from __future__ import annotations

from railgun.errors import RailgunError


class BatchError(RailgunError):
    """A batch run cannot be made like that. Says which step and which column it is about."""
