"""Stage files that no reader sees before they are complete, and that appear once, whatever crashes in between.

Rules:

1. A file is written under `<directory>/.staged/<flow>/<step>/<generation>-<store>/`, with an ending of its own, where
   the store is the identity of the directory of the flow's snapshots. Readers skip names that begin with a dot (Spark,
   pandas, Arrow, shells), and patterns like `**/*.jsonl` do not match it.
2. To *seal* a file: fsync of the file, then of its directory. From then on it may be committed, and no writer touches
   it.
3. To *commit* a file: rename it into `<directory>`, then fsync of both directories. A rename happens wholly or not at
   all, so the file appears in one step. A commit that finds the file renamed syncs the directories too: the process
   that renamed it may have died before it did so.
4. A commit that finds nothing staged but the final file was done before, and does nothing. If neither exists, output is
   lost, and the error names the file.
5. Names end with a random part. So two writers never have the same name, be it two stages with one sink, a worker that
   came back, another flow in the same directory, or a flow that began anew and counts its snapshots from 1 again. The
   token has the name, so a repeated commit means the same file.
6. When a generation begins, its tokens are committed; then what earlier generations have staged is deleted. A process
   of an earlier generation that still runs then finds its file gone, or writes a file that is never committed. What
   another job of the same flow has staged is left alone: its snapshots are in another directory.
7. A file of which a write or an fsync has failed is never sealed: after a failed fsync the kernel may have dropped what
   it could not write, and a second fsync would not report that.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeAlias
from urllib.parse import quote

from railgun.flows.errors import ConnectorError, LostOutputError
from railgun.flows.sink import Place, Token, TwoPhaseSink

Mode: TypeAlias = Literal["exactly-once", "at-least-once"]
MODES: Final = ("exactly-once", "at-least-once")

STAGED: Final = ".staged"
_ENDING: Final = ".staged"
_GENERATION: Final = re.compile(r"([0-9]+)(?:-(.*))?")


class StagedSink(TwoPhaseSink[Any]):
    """A sink whose output is files in a directory; subclasses say how the files are written."""

    def __init__(self, directory: str | os.PathLike[str], mode: str) -> None:
        if mode not in MODES:
            raise ConnectorError(
                f"{type(self).__name__}({str(directory)!r}) delivers 'exactly-once' or 'at-least-once', "
                f"not {mode!r}"
            )
        self.directory = Path(directory).absolute()
        self.mode = mode

    def commit(self, token: Token) -> None:
        """Let the file of a token appear."""
        commit(self.directory, token)

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        """Do `recover_at` for a flow without a snapshot directory."""
        self.recover_at(Place(flow, step, 0, generation, transactional=True), tokens)

    def recover_at(self, place: Place, tokens: Sequence[Token]) -> None:
        """Commit these files, and delete what else older generations of this job have staged."""
        for token in tokens:
            commit(self.directory, token)
        discard(self.directory, place)


class Staging:
    """The directory in which the writer of one step, worker and generation stages its files."""

    def __init__(self, directory: Path, place: Place, ending: str) -> None:
        self.directory = directory
        self.place = place
        self.ending = ending
        self.step = step_directory(directory, place.flow, place.step)
        self.staged = self.step / generation_name(place)
        with self.writing(directory):
            self._make()
            _check(directory, self.staged)

    def create(self) -> StagedFile:
        """Create a file with a name of its own."""
        return StagedFile(self)

    def open(self, name: str) -> int:
        """Create a file with this name; return its descriptor."""
        path = self.staged / name
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileNotFoundError:  # another process has deleted the directory
            self._make()
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def _make(self) -> None:
        """Make the directories, and sync each directory's parent, whichever process made it."""
        missing = [self.directory]
        while not missing[-1].parent.is_dir():
            missing.append(missing[-1].parent)
        below = (self.step.parent.parent, self.step.parent, self.step, self.staged)
        for path in (*reversed(missing), *below):
            with suppress(FileExistsError):
                os.mkdir(path)
                sync_directory(path.parent)
        for path in below:
            sync_directory(path.parent)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Raise errors of the operating system as `ConnectorError` with step, file and reason."""
        try:
            yield
        except OSError as error:
            why = error.strerror or error
            raise ConnectorError(f"sink {self.place.step!r} cannot write {path}: {why}") from error


class StagedFile:
    """A staged file that is being written."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self.unique = uuid.uuid4().hex[:8]
        name = f"{staging.place.worker}-{self.unique}{staging.ending}{_ENDING}"
        self.path = staging.staged / name
        self.failed = False
        with staging.writing(self.path):
            self.file: BinaryIO = os.fdopen(staging.open(name), "wb")

    def check(self) -> None:
        """Raise `ConnectorError` if an earlier write has failed."""
        if self.failed:
            raise ConnectorError(
                f"sink {self.staging.place.step!r}: {self.path} could not be written before, and is not complete"
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Mark the file as failed if the block raises: then it is never written to or sealed again."""
        self.check()
        done = False
        try:
            with self.staging.writing(self.path):
                yield
            done = True
        finally:
            self.failed = self.failed or not done

    def write(self, data: bytes) -> None:
        """Append bytes to the file."""
        with self.writing():
            self.file.write(data)

    def flush(self) -> None:
        """Hand buffered bytes to the operating system."""
        with self.writing():
            self.file.flush()

    def seal(self, snapshot: int | None) -> Token:
        """Sync the complete file to disk, and return its token; `snapshot` is None if it belongs to no snapshot."""
        place = self.staging.place
        with self.writing():
            self.file.flush()
            os.fsync(self.file.fileno())
            size = self.file.tell()
            self.file.close()
            sync_directory(self.path.parent)
        step = re.sub(r"[^\w.+=@-]", "_", place.step)
        label = "" if snapshot is None else f"{snapshot}-"
        label += f"{place.worker}-{place.generation}"
        return {
            "step": place.step,
            "directory": str(self.staging.directory),
            "staged": self.path.relative_to(self.staging.directory).as_posix(),
            "name": f"part-{step}-{label}-{self.unique}{self.staging.ending}",
            "size": size,
        }

    def publish(self) -> None:
        """Seal the file and let it appear at once: it belongs to no snapshot."""
        with self.writing():
            commit(self.staging.directory, self.seal(None))

    def discard_failed(self) -> None:
        """Delete the file if a write has failed."""
        if self.failed:
            self.discard()

    def discard(self) -> None:
        """Close and delete the file; errors are ignored."""
        with suppress(OSError):
            self.file.close()  # this may try to write what is buffered
        with suppress(OSError):
            os.unlink(self.path)


def commit(directory: Path, token: Token) -> None:
    """Let a sealed file appear under its final name, unless it has already.

    Look for it where it was written, and also in the sink's present directory, if that is another: a flow may go on
    with another directory, and a directory may have been moved.
    """
    step, written, staged, name, size = _parts(token)
    missing = []
    for place in dict.fromkeys((Path(written), directory)):
        source, target = place / staged, place / name
        try:
            if _rename(source, target, size):
                return
        except OSError as error:
            raise ConnectorError(
                f"sink {step!r} cannot rename {source} to {target}: {error.strerror or error}; "
                "correct that, and start the flow again"
            ) from error
        missing.append(f"{source} nor {target}")
    raise LostOutputError(
        f"sink {step!r}: output of a whole snapshot is lost: there is neither {', neither '.join(missing)}. "
        "Files of the last snapshot must stay where they are until the next one; every worker, and the program that "
        "starts the flow, must see the same directory"
    )


def _rename(source: Path, target: Path, size: int) -> bool:
    """Rename a file and sync both directories; return False if neither the source nor the target exists."""
    try:
        size_on_disk = os.stat(source).st_size
        if size_on_disk != size:
            raise LostOutputError(
                f"output of a whole snapshot is damaged: {source} has {size_on_disk} bytes, and had {size} when it was "
                "written"
            )
        os.rename(source, target)
    except (FileNotFoundError, NotADirectoryError):
        if not target.exists():
            return False
    sync_directory(target.parent)
    with suppress(FileNotFoundError):  # the directory was deleted
        sync_directory(source.parent)
    return True


def generation_name(place: Place) -> str:
    """Return the name of the directory in which a generation of a flow stages its files.

    >>> generation_name(Place("orders", "totals", 0, 7, store="5f3a")), generation_name(Place("orders", "totals", 0, 7))
    ('7-5f3a', '7')
    """
    return f"{place.generation}-{_quoted(place.store)}" if place.store else str(place.generation)


def discard(directory: Path, place: Place) -> None:
    """Delete what earlier generations of this job have staged."""
    step, step_path = place.step, step_directory(directory, place.flow, place.step)
    store = _quoted(place.store) if place.store else None
    try:
        old = [
            step_path / name
            for name in sorted(_names(step_path))
            if (match := _GENERATION.fullmatch(name))
            and int(match[1]) < place.generation
            and match[2] == store
        ]
        for generation_directory in old:
            for name in _names(generation_directory):
                with suppress(FileNotFoundError):
                    os.unlink(generation_directory / name)
            try:
                os.rmdir(generation_directory)
            except FileNotFoundError:
                pass
            except OSError as error:
                # A process of an older generation may still run, and write a new file there.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    except OSError as error:
        raise ConnectorError(
            f"sink {step!r} cannot clear up {step_path}: {error.strerror or error}"
        ) from error


def step_directory(directory: Path, flow: str, step: str) -> Path:
    """Return the directory for all that a step keeps out of readers' sight."""
    return directory / STAGED / _quoted(flow) / _quoted(step)


def _quoted(name: str) -> str:
    """Return a name as the name of a directory; different names stay different."""
    return quote(name, safe=" +=@,").replace(".", "%2E") or "%"


def _parts(token: Token) -> tuple[str, str, str, str, int]:
    match token:
        case {
            "step": str(step),
            "directory": str(directory),
            "staged": str(staged),
            "name": str(name),
            "size": int(size),
        }:
            return step, directory, staged, name, size
    shown = dict(token) if isinstance(token, Mapping) else token
    raise ConnectorError(
        f"{shown!r} is not a token of a sink that writes files: was the step another sink when its snapshot was taken?"
    )


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _check(directory: Path, staged: Path) -> None:
    """Raise an error if files cannot be made in one directory and renamed into the other, as far as is visible."""
    for path in (staged, directory):
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"no files can be made in {path}")
    if os.stat(directory).st_dev != os.stat(staged).st_dev:
        raise OSError(errno.EXDEV, f"{staged} is on another file system, so nothing can be renamed")


def sync_directory(directory: Path) -> None:
    """Sync the names in a directory to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems do not support this.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
