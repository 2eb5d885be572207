"""Identify a process, so that another process can tell whether it has ended.

A host name and a process number are not enough: containers share host names, every container has a process 1, and
numbers are reused. A process is identified by:

- the host name and the machine id (`/etc/machine-id`): which machine or container;
- the boot id of the kernel, and the namespace of process numbers: where the process number is valid;
- the process number and the time the process began: which process.

A process counts as ended only if that is certain: a process of another machine, kernel or namespace may be alive.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FIRST_NAMESPACE: Final = "pid:[4026531836]"
"""The namespace of process numbers with which a Linux kernel starts: outside of containers."""


@dataclass(frozen=True, slots=True)
class Process:
    """The identity of a process, by which another process recognizes it. Unknown fields are empty."""

    host: str
    pid: int
    birth: str
    """When the process began, as its system writes it: distinguishes it from a later process of that number."""
    machine_id: str = ""
    boot_id: str = ""
    namespace: str = ""

    @staticmethod
    def this() -> Process:
        """Return the identity of this process."""
        pid = os.getpid()
        return Process(socket.gethostname(), pid, birth_of(pid) or "", *_surroundings())

    def is_gone(self) -> bool:
        """Return whether this process has certainly ended."""
        if self.pid <= 0:
            return True
        here = Process.this()
        if (self.host, self.machine_id) != (here.host, here.machine_id):
            return False
        if self.boot_id != here.boot_id:
            # The machine was restarted. In a container, the boot id is that of the machine that runs the container.
            comparable = self.machine_id and self.boot_id and here.boot_id
            return bool(comparable) and self.namespace == here.namespace == FIRST_NAMESPACE
        if self.namespace != here.namespace:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # a process of another user
        birth = birth_of(self.pid)
        return birth is None or (self.birth != "" and birth != self.birth)


@functools.cache
def _surroundings() -> tuple[str, str, str]:
    """Return the machine id, the boot id and the namespace of process numbers."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return _line("/etc/machine-id"), _line("/proc/sys/kernel/random/boot_id"), namespace


def _line(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def birth_of(pid: int) -> str | None:
    """Return when the process of this number began; None if there is none, or only a zombie.

    >>> birth_of(os.getpid()) == birth_of(os.getpid()) is not None
    True
    """
    if pid <= 0:
        return None
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            after_name = stat.read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            return None
        state, ticks = after_name[0], after_name[19]
        return None if state in "ZX" else ticks
    output = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return output or None
