"""Errors of snapshots: each names the file, says what happened to it, and what to do next."""

from __future__ import annotations

from railgun.errors import ExitCode, LaterVersionError, RailgunError
from railgun.transport import columns


class SnapshotError(RailgunError):
    """A snapshot cannot be saved or loaded."""

    exit_code = ExitCode.SNAPSHOTS


class UndecidedError(SnapshotError):
    """A manifest could be neither written nor deleted again: after a power cut it may be there or not."""


class DamagedError(SnapshotError):
    """A file is not what was written: it is truncated, changed, or missing although a manifest names it."""


class FormatError(SnapshotError, LaterVersionError):
    """A file was written by a later Railgun, in a format that this version does not know."""


class EncodingError(SnapshotError):
    """A key or a state cannot be saved."""


class UnpicklableError(EncodingError, columns.EncodingError):
    """A key or a state cannot be saved because pickle refuses it; a retry would fail again."""


class DecodingError(SnapshotError):
    """A key or a state cannot be decoded from what was saved, although the file is undamaged."""


class UnloadableError(DecodingError, columns.CannotUnpickleError):
    """A key or a state cannot be decoded because unpickling it raises; a retry would fail again."""


class DoesNotFitError(SnapshotError):
    """A snapshot and a flow do not belong together, or no longer do."""
