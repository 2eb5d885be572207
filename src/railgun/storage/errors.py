"""Errors of files and locks: each names the file and says what to do next."""

from __future__ import annotations

from railgun.errors import ExitCode, RailgunError


class StorageError(RailgunError):
    """A path, a file or a lock of a data directory cannot be used."""

    exit_code = ExitCode.SNAPSHOTS


class DiskError(StorageError):
    """A file cannot be written, read, listed or deleted."""


class FullDiskError(DiskError):
    """A file cannot be written because the disk, a quota or a limit of the process is exhausted."""


class ReadOnlyError(DiskError):
    """A file cannot be written: the disk is read-only, or this user lacks the permission."""


class MissingError(DiskError):
    """A file does not exist."""

    exit_code = ExitCode.USAGE
    kind = "no-snapshot"


class LockedError(StorageError):
    """Another job uses this directory, or has taken it over."""

    exit_code = ExitCode.NO_JOB
    kind = "locked"
