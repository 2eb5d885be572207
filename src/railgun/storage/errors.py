"""What can go wrong with files and their locks: each error names the file and says what to do next."""

from __future__ import annotations

from railgun.errors import ExitCode, RailgunError


class StorageError(RailgunError):
    """A path, a file or a lock of a data directory cannot be used."""

    exit_code = ExitCode.SNAPSHOTS


class DiskError(StorageError):
    """A file cannot be written, read, listed or deleted."""


class FullDiskError(DiskError):
    """There is no room for a file: the disk, a quota or a limit of the process is used up."""


class ReadOnlyError(DiskError):
    """A file cannot be written where it should be: this user may not, or nobody may."""


class MissingError(DiskError):
    """A file is not there."""

    exit_code = ExitCode.USAGE
    kind = "no-snapshot"


class LockedError(StorageError):
    """Another job works in this directory, or has taken it over."""

    exit_code = ExitCode.NO_JOB
    kind = "locked"
