"""What can go wrong with snapshots: each error names the file, says what happened to it, and what to do next."""

from __future__ import annotations

from railgun.errors import LaterVersionError, RailgunError
from railgun.transport import columns


class SnapshotError(RailgunError):
    """A snapshot cannot be saved, or cannot be loaded."""


class DiskError(SnapshotError):
    """A file cannot be written, read, listed or deleted."""


class FullDiskError(DiskError):
    """There is no room for a file: the disk, a quota or a limit of the process is used up."""


class ReadOnlyError(DiskError):
    """A file cannot be written where it should be: this user may not, or nobody may."""


class UndecidedError(SnapshotError):
    """A manifest could not be written, and could not be taken back either: it may be there after a power cut."""


class MissingError(DiskError):
    """A file is not there."""


class DamagedError(SnapshotError):
    """A file is not what was written: cut off, changed, or gone though something names it."""


class FormatError(SnapshotError, LaterVersionError):
    """A file was written by a newer Railgun, in a format this one does not know."""


class LockedError(SnapshotError):
    """Another job works in this directory, or has taken it over."""


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
