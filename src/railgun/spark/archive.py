"""Make and use an archive of Spark's classes, with which a JVM starts in half the time.

A JVM that starts Spark loads and verifies some ten thousand classes. It can write them to a file when it exits, in the
form they have in memory, and a later JVM maps that file. `python -m railgun.spark.archive` makes the file once, in the
user's cache directory (about 120 MB, and half a minute); quick sessions use it if it exists, and nothing else depends
on it.

The JVM itself checks that an archive was made by the same runtime from the same jars, and starts without it otherwise.
The archive is written under another name and renamed when it is complete, so an incomplete one is never used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from railgun.errors import RailgunError

__all__ = ["ArchiveError", "archive_options", "archive_path", "make_archive"]

ARCHIVE_PROGRAM = """
import sys
from pyspark import SparkContext
from railgun.spark.session import session

spark = session("archive", quick=True, conf={"spark.driver.extraJavaOptions": sys.argv[1]})
spark.sparkContext.parallelize([1], 1).map(lambda item: item).collect()
spark.range(10).groupBy("id").count().collect()
spark.stop()
jvm = SparkContext._gateway.proc
SparkContext._gateway.shutdown()
jvm.stdin.close()
jvm.wait()
"""


class ArchiveError(RailgunError):
    """The archive could not be made; sessions start without it."""


def archive_path(java_home: Path, environ: Mapping[str, str]) -> Path:
    """Return the path of the archive for this Java runtime and this Spark, whether it exists or not."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    spec = importlib.util.find_spec("pyspark")
    jars = spec.submodule_search_locations if spec else None
    key = hashlib.sha256(repr((str(java_home), list(jars or ()))).encode()).hexdigest()[:16]
    return Path(base) / "railgun" / f"spark-{key}.jsa"


def archive_options(java_home: Path, environ: Mapping[str, str]) -> list[str]:
    """Return the JVM's options to use the archive, or no options if there is no archive."""
    path = archive_path(java_home, environ)
    if not path.is_file() or " " in str(path):
        return []
    return [f"-XX:SharedArchiveFile={path}", "-Xshare:auto", "-Xlog:disable"]


def make_archive(java_home: Path, environ: Mapping[str, str]) -> Path:
    """Make the archive, with a small session in a process of its own; return its path. Raise `ArchiveError`."""
    path = archive_path(java_home, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="archive-", dir=path.parent) as directory:
        archive = Path(directory) / path.name
        options = f"-XX:ArchiveClassesAtExit={archive} -Xlog:disable"
        done = subprocess.run(
            [sys.executable, "-c", ARCHIVE_PROGRAM, options],
            env={**environ, "XDG_CACHE_HOME": directory, "JAVA_HOME": str(java_home)},
            capture_output=True,
            text=True,
        )
        if done.returncode or not archive.is_file():
            raise ArchiveError(f"the JVM at {java_home} wrote no archive: {done.stderr.strip()}")
        os.replace(archive, path)
    return path


def main() -> None:
    """Make the archive and print its path."""
    from railgun.spark.java import find_java

    print(make_archive(find_java(os.environ), os.environ))


if __name__ == "__main__":
    main()
