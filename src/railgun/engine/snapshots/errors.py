"""What can go wrong with snapshots: each error names the file, says what happened to it, and what to do next."""

from __future__ import annotations

from railgun.errors import ExitCode, LaterVersionError, RailgunError
from railgun.transport import columns


class SnapshotError(RailgunError):
    """A snapshot cannot be saved, or cannot be loaded."""

    exit_code = ExitCode.SNAPSHOTS


class UndecidedError(SnapshotError):
    """A manifest could not be written, and could not be taken back either: it may be there after a power cut."""


class DamagedError(SnapshotError):
    """A file is not what was written: cut off, changed, or gone though something names it."""


class FormatError(SnapshotError, LaterVersionError):
    """A file was written by a newer Railgun, in a format this one does not know."""


class EncodingError(SnapshotError):
    """A key or a state cannot be saved."""


class UnpicklableError(EncodingError, columns.EncodingError):
    """A key or a state cannot be saved: pickle refuses it, and would again."""


class DecodingError(SnapshotError):
    """A key or a state cannot be made again from what was saved, though the file is whole."""


class UnloadableError(DecodingError, columns.CannotUnpickleError):
    """A key or a state cannot be made again from what was saved: unpickling it raises, and would again."""


class DoesNotFitError(SnapshotError):
    """A snapshot and a flow do not belong together, or no longer do."""
