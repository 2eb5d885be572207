"""An archive of Spark's classes, by which a JVM starts in half the time.

A JVM that starts Spark loads and checks some ten thousand classes. It can write them to a file at
its exit, in the form they have in memory, and a later one maps that file. `python -m
railgun.spark.archive` makes the file once, in the user's cache directory (about 120 MB, and half a
minute); quick sessions use it if it is there, and nothing else depends on it.

The JVM itself checks that an archive was made by the same runtime from the same jars, and starts
without it otherwise. It is written beside and renamed when it is whole, so none is ever half there.
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

MADE_BY = """
import sys
from pyspark import SparkContext
from railgun.spark.session import session

spark = session("archive", quick=True, conf={"spark.driver.extraJavaOptions": sys.argv[1]})
spark.sparkContext.parallelize([1], 1).map(lambda one: one).collect()
spark.range(10).groupBy("id").count().collect()
spark.stop()
jvm = SparkContext._gateway.proc
SparkContext._gateway.shutdown()
jvm.stdin.close()
jvm.wait()
"""


class ArchiveError(RailgunError):
    """The archive was not made; sessions start without it."""


def archive_path(java_home: Path, environ: Mapping[str, str]) -> Path:
    """Where the archive of this runtime and this Spark is, or would be."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    found = importlib.util.find_spec("pyspark")
    jars = found.submodule_search_locations if found else None
    key = hashlib.sha256(repr((str(java_home), list(jars or ()))).encode()).hexdigest()[:16]
    return Path(base) / "railgun" / f"spark-{key}.jsa"


def archive_options(java_home: Path, environ: Mapping[str, str]) -> list[str]:
    """The JVM's options to use the archive; none if there is none."""
    path = archive_path(java_home, environ)
    if not path.is_file() or " " in str(path):
        return []
    return [f"-XX:SharedArchiveFile={path}", "-Xshare:auto", "-Xlog:disable"]


def make_archive(java_home: Path, environ: Mapping[str, str]) -> Path:
    """Make the archive anew, by a small session in a process of its own."""
    path = archive_path(java_home, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="archive-", dir=path.parent) as directory:
        made = Path(directory) / path.name
        options = f"-XX:ArchiveClassesAtExit={made} -Xlog:disable"
        done = subprocess.run(
            [sys.executable, "-c", MADE_BY, options],
            env={**environ, "XDG_CACHE_HOME": directory, "JAVA_HOME": str(java_home)},
            capture_output=True,
            text=True,
        )
        if done.returncode or not made.is_file():
            raise ArchiveError(f"the JVM at {java_home} wrote no archive: {done.stderr.strip()}")
        os.replace(made, path)
    return path


def main() -> None:
    """Make it, and tell where it is."""
    from railgun.spark.session import find_java

    print(make_archive(find_java(os.environ), os.environ))


if __name__ == "__main__":
    main()
