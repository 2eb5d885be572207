"""Find servers that tests and benchmarks run beside Railgun: on the PATH, or fetched from Debian without root.

Rules:

1. A program on the PATH is used. Otherwise packages are fetched once, and unpacked in a directory of their own: nothing
   is installed, and nothing of the machine changes.
2. apt checks the signatures. Without a list of packages, as on a new machine, apt gets a temporary one.
3. If the program cannot be found, an error says what to install. Callers that need the program must not go on without.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from railgun.errors import RailgunError

APT_TIMEOUT_S: Final = 300.0


class NoProgramError(RailgunError):
    """Raised when a program is not on this machine, and could not be fetched."""


def find_program(
    name: str, packages: Sequence[str], home: Path, *, probe_argument: str = "--version"
) -> tuple[str, dict[str, str]]:
    """Return the path of a program, and the environment to run it in.

    `packages` names the package of the program first, `home` is where packages are unpacked, and `probe_argument` is
    the argument that the program must answer to.
    """
    environment = dict(os.environ)
    installed = shutil.which(name)
    if installed is not None:
        return installed, environment
    home.parent.mkdir(parents=True, exist_ok=True)
    # Of two processes, the second waits.
    with open(home.with_name(f"{home.name}.guard"), "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        program = home / "usr" / "bin" / name
        if not program.exists():
            _fetch(name, packages, home)
    libraries = [str(path) for path in sorted((home / "usr" / "lib").glob("*-linux-gnu*"))]
    if libraries:
        environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    tried = subprocess.run(
        [program, probe_argument], env=environment, capture_output=True, text=True, check=False
    )
    if tried.returncode:
        raise NoProgramError(
            f"{program} does not run: {tried.stderr.strip()}; install {packages[0]}"
        )
    return str(program), environment


def _fetch(name: str, packages: Sequence[str], home: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise NoProgramError(
            f"there is no {name} on the PATH, and no apt-get to fetch it: install {packages[0]}"
        )
    print(f"fetching {', '.join(packages)} into {home} (once)", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="railgun-debian-") as directory:
        here = Path(directory)
        try:
            _do(["apt-get", "download", *packages], here)
        except NoProgramError:
            own = _own_lists(here)
            _do(["apt-get", *own, "update"], here)
            _do(["apt-get", *own, "download", *packages], here)
        for package in sorted(here.glob("*.deb")):
            _do(["dpkg", "-x", str(package), str(here / "laid-out")], here)
        if not (here / "laid-out" / "usr" / "bin" / name).exists():
            raise NoProgramError(f"{packages[0]} has no program {name}; install one by hand")
        shutil.rmtree(home, ignore_errors=True)
        unpacked = home.with_name(f"{home.name}.new")
        shutil.rmtree(unpacked, ignore_errors=True)
        shutil.copytree(here / "laid-out", unpacked, symlinks=True)
        unpacked.rename(home)


def _own_lists(here: Path) -> list[str]:
    """Return the apt options that keep its lists in `here`, and not where only root may write."""
    for partial in ("lists/partial", "cache/archives/partial"):
        (here / partial).mkdir(parents=True, exist_ok=True)
    return ["-o", f"Dir::State::lists={here / 'lists'}", "-o", f"Dir::Cache={here / 'cache'}"]


def _do(command: list[str], directory: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=APT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise NoProgramError(f"{' '.join(command)} did not end; is there a network?") from None
    if done.returncode:
        raise NoProgramError(f"{' '.join(command)} failed: {done.stderr.strip()}")
