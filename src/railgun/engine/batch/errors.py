"""The error of batch runs."""

from __future__ import annotations

from railgun.errors import RailgunError


class BatchError(RailgunError):
    """A batch run cannot be done as asked. The message names the step and the column."""
