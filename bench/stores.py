"""Embedded stores at the work of keyed state on disk: batches of random keys, more data than cache.

Each store runs in a process of its own, without durability, with a cache of 64 MiB where it has one. Keys are 8 bytes
(hashes), values 100. `update` is what a step does with keys that are not in memory: read a batch, write it back. Before
the `from disk` figures the system is asked to forget the files. A store that is not installed is left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from verification.report import Report, options

from railgun.engine.state.rocks import Rocks

CACHE = 64 << 20
BATCH = 1_000
Rows = list[tuple[bytes, bytes]]


class Store(Protocol):
    def __init__(self, path: str) -> None: ...
    def put(self, rows: Rows) -> None: ...
    def get(self, keys: list[bytes]) -> Sequence[bytes | None]: ...
    def delete(self, keys: list[bytes]) -> None: ...
    def scan(self) -> Iterable[bytes]: ...
    def close(self) -> None: ...


class OurRocks:
    def __init__(self, path: str) -> None:
        self.db = Rocks(path, CACHE, CACHE // 2)

    def put(self, rows: Rows) -> None:
        self.db.write(dict(rows))

    def get(self, keys: list[bytes]) -> Sequence[bytes | None]:
        return self.db.read(keys)

    def delete(self, keys: list[bytes]) -> None:
        self.db.write({}, keys)

    def scan(self) -> Iterable[bytes]:
        return (key for key, _ in self.db.scan(bytes(8), b"\xff" * 9))

    def close(self) -> None:
        self.db.close()


class Lmdb:
    def __init__(self, path: str) -> None:
        lmdb: Any = importlib.import_module("lmdb")
        options = {"sync": False, "metasync": False, "writemap": True, "readahead": False}
        self.env = lmdb.open(path, map_size=16 << 30, lock=False, **options)

    def put(self, rows: Rows) -> None:
        with self.env.begin(write=True) as change, change.cursor() as cursor:
            cursor.putmulti(sorted(rows))

    def get(self, keys: list[bytes]) -> Sequence[bytes | None]:
        with self.env.begin() as look:
            return [look.get(key) for key in keys]

    def delete(self, keys: list[bytes]) -> None:
        with self.env.begin(write=True) as change:
            for key in keys:
                change.delete(key)

    def scan(self) -> Iterable[bytes]:
        with self.env.begin() as look:
            yield from look.cursor().iternext(values=False)

    def close(self) -> None:
        self.env.close()


class Sqlite:
    def __init__(self, path: str) -> None:
        self.db = sqlite3.connect(f"{path}/db", isolation_level=None)
        for setting in ("journal_mode=off", "synchronous=off", f"cache_size=-{CACHE >> 10}"):
            self.db.execute(f"pragma {setting}")
        self.db.execute("create table if not exists t (k blob primary key, v blob) without rowid")

    def put(self, rows: Rows) -> None:
        self.db.execute("begin")
        self.db.executemany("insert or replace into t values (?, ?)", sorted(rows))
        self.db.execute("commit")

    def get(self, keys: list[bytes]) -> Sequence[bytes | None]:
        marks = ",".join("?" * len(keys))
        found = dict(self.db.execute(f"select k, v from t where k in ({marks})", keys))
        return list(map(found.get, keys))

    def delete(self, keys: list[bytes]) -> None:
        self.db.execute("begin")
        self.db.executemany("delete from t where k = ?", [(key,) for key in keys])
        self.db.execute("commit")

    def scan(self) -> Iterable[bytes]:
        return (key for (key,) in self.db.execute("select k from t"))

    def close(self) -> None:
        self.db.close()


STORES: dict[str, tuple[type[Store], str]] = {
    "rocksdict": (OurRocks, "rocksdict"),
    "lmdb": (Lmdb, "lmdb"),
    "sqlite3": (Sqlite, "sqlite3"),
}


def main(argv: Sequence[str] | None = None) -> int:
    chosen, console = options("bench stores", (__doc__ or "").partition("\n")[0], argv)
    rows = 200_000 if chosen.quick else 2_000_000
    report = Report("stores")
    for name, (_, module) in STORES.items():
        if importlib.util.find_spec(module) is None:
            console.print(f"{name} is not installed", style="dim")
            continue
        command = [sys.executable, "-c", f"from bench import stores; stores.run({name!r}, {rows})"]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        for what, (value, unit) in json.loads(ran.stdout).items():
            report.check(f"{name}: {what}", value, unit)
            console.print(f"{name}: {what}: {value} {unit}", style="dim")
    return report.finish(chosen)


def run(name: str, rows: int) -> None:
    """Measure one store, in a process of its own."""
    kind, chance = STORES[name][0], random.Random(1)
    path = tempfile.mkdtemp(prefix="bench-stores-")
    try:
        print(json.dumps(measure(kind, path, rows, chance)))
    finally:
        shutil.rmtree(path)


def measure(kind: type[Store], path: str, rows: int, chance: random.Random) -> dict[str, Any]:
    def key(n: int) -> bytes:
        return (n * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big")

    def some() -> list[bytes]:
        return sorted(key(n) for n in chance.sample(range(rows), BATCH))  # as our store asks

    value = chance.randbytes(rows + 100)  # what does not compress
    before, store, found = resident(), kind(path), {}

    def batches() -> Iterable[Rows]:
        for at in range(0, rows, BATCH):
            yield [(key(n), value[n : n + 100]) for n in range(at, at + BATCH)]

    def timed(what: str, work: Callable[[Any], Any], batches: Iterable[Any]) -> None:
        took, cpu = [], 0
        for batch in batches:
            busy, began = time.process_time_ns(), time.perf_counter_ns()
            work(batch)
            took.append((time.perf_counter_ns() - began) / 1_000 / BATCH)
            cpu += time.process_time_ns() - busy
        found[what] = round(sum(took) / len(took), 2), "µs/key"
        found[f"{what}, processor"] = round(cpu / 1_000 / BATCH / len(took), 2), "µs/key"
        found[f"{what}, longest of a batch"] = round(max(took) * BATCH / 1_000, 1), "ms"

    def update(keys: list[bytes]) -> None:
        store.put(
            [(key, (old or b"")[::-1]) for key, old in zip(keys, store.get(keys), strict=True)]
        )

    timed("put", store.put, batches())
    several = rows // BATCH // 4
    timed("get", store.get, (some() for _ in range(several)))
    timed(
        "get what is not there",
        store.get,
        ([os.urandom(8) for _ in range(BATCH)] for _ in range(several)),
    )
    timed("update", update, (some() for _ in range(several)))
    began = time.perf_counter()
    assert sum(1 for _ in store.scan()) == rows
    found["scan"] = round((time.perf_counter() - began) * 1e6 / rows, 2), "µs/key"
    found["on disk"] = (
        round(sum(f.stat().st_blocks * 512 for f in Path(path).iterdir()) / rows),
        "bytes/key",
    )
    found["memory"] = round((resident() - before) / (1 << 20)), "MiB"
    store.close()
    forget(path)
    store = kind(path)
    timed("get, from disk", store.get, (some() for _ in range(20)))
    timed("update, from disk", update, (some() for _ in range(20)))
    timed("delete", store.delete, (some() for _ in range(several)))
    store.close()
    found["most memory"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), "MiB"
    return found


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def forget(path: str) -> None:
    """Ask the system to forget what it holds of these files."""
    for file in Path(path).iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
