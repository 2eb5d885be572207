"""Read and write format files, which record the format and version of a data directory.

Every data directory holds a small file, `format`, with the name of its format and a version, as JSON::

    {"format": "railgun stream", "version": 1}

Rules:

1. The file is written when the directory is created. A directory without the file was created before format files
   existed: it has version 1, and gets the file once it has been opened.
2. A directory of a later version is refused (`LaterVersionError`) before anything in it is changed: an older program
   cannot know what it would destroy. So is a directory of another format.
3. A directory of an older version is opened, and then gets the version of the program that opened it. Raise a version
   when an older program would misread, drop or damage the data written from now on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from railgun.errors import LaterVersionError, RailgunError

FORMAT_FILE: Final = "format"


class OtherFormatError(RailgunError):
    """A directory holds data of another kind, or its format file cannot be read."""

    code: ClassVar[str] = "OTHER_FORMAT"


@dataclass(frozen=True, slots=True)
class Format:
    """The format of a kind of directory, in the version that this program writes.

    >>> stream = Format("railgun stream", 1)
    >>> stream.needs_writing(None, "data/streams/orders"), stream.needs_writing(stream.dump(), "data/streams/orders")
    (True, False)
    >>> stream.needs_writing(Format("railgun stream", 2).dump(), "data/streams/orders")
    Traceback (most recent call last):
    railgun.errors.LaterVersionError: data/streams/orders has version 2 of the format 'railgun stream', and this \
Railgun knows versions up to 1. Nothing was changed. Open it with the Railgun that wrote it, or a later one.
    """

    name: str
    version: int

    def dump(self) -> bytes:
        """Return the content of the format file."""
        return json.dumps({"format": self.name, "version": self.version}).encode() + b"\n"

    def needs_writing(self, content: bytes | None, where: str) -> bool:
        """Check the format file of the directory `where`; None means that there is none.

        Return whether the file has to be written, because it is missing or of an older version. Raise
        `LaterVersionError` for a later version and `OtherFormatError` for anything that is not this format.
        """
        if content is None:
            return True
        try:
            found: Any = json.loads(content)
            name, version = found["format"], found["version"]
            if not isinstance(name, str) or type(version) is not int:
                raise ValueError("it has no name and version")
        except (ValueError, KeyError, TypeError) as error:
            raise OtherFormatError(
                f"{where}/{FORMAT_FILE} cannot be read: {error}. Nothing was changed. Restore the file; or, if the "
                f"directory was written by this version, write {self.dump().decode().strip()} to it."
            ) from error
        if name != self.name:
            raise OtherFormatError(
                f"{where} has the format {name!r}, and not {self.name!r}. Nothing was changed. Give another directory."
            )
        if version > self.version:
            raise LaterVersionError(
                f"{where} has version {version} of the format {name!r}, and this Railgun knows versions up to "
                f"{self.version}. Nothing was changed. Open it with the Railgun that wrote it, or a later one."
            )
        return version < self.version


def read_format_file(directory: Path) -> bytes | None:
    """Return the content of the format file of a local directory; None if there is none."""
    try:
        return (directory / FORMAT_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
