"""`railgun state`: show the state of keys, of a running job or in a snapshot."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from railgun.cli import job_view as view
from railgun.cli.arguments import KEY_HELP, add_job_name, number
from railgun.cli.errors import DONE, FAILED, USAGE, CommandError
from railgun.cli.jobs import find
from railgun.cli.output import Output
from railgun.transport.registry import Registry

if TYPE_CHECKING:
    from railgun.engine.controller.snapshot_directory import Row, SavedState

DEFAULT_LIMIT_KEYS: Final = 20
OFFLINE: Final = ("snapshot", "limit", "sql")


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Show the state of a key, or the keys of a step."""
    if options.dir is not None:
        return _saved(options, out)
    if options.name is None:
        raise CommandError(
            USAGE,
            "usage",
            "state of which job? Give the name of a running job, or --dir with a directory",
        )
    for option in OFFLINE:
        if getattr(options, option) is not None:
            raise CommandError(USAGE, "usage", f"--{option} is for snapshots: it needs --dir")
    return _live(options, out, registry)


def _live(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Show the state of a running job, as its workers have it."""
    fields = {"step": options.step, "key": options.key}
    query = urlencode({name: value for name, value in fields.items() if value is not None})
    state = find(options.name, registry).get(f"/state?{query}")
    out.data(**state)
    if options.key is None:
        out.show(view.keys(state))
    else:
        out.line(
            json.dumps(state["state"], ensure_ascii=False) if "state" in state else state["repr"]
        )
    return DONE


# ---------------------------------------------------------------- state in a snapshot


def _saved(options: argparse.Namespace, out: Output) -> int:
    from railgun.engine.controller.snapshot_directory import SavedState, find_store, steps_in

    if options.key is not None and options.sql is not None:
        raise CommandError(USAGE, "usage", "either --key or --sql")
    if options.key is not None and options.limit is not None:
        raise CommandError(USAGE, "usage", "--limit is for many keys, not for --key")
    _, store = find_store(options.dir, options.name)
    manifest = store.latest() if options.snapshot is None else store.get(options.snapshot)
    if manifest is None:
        raise CommandError(USAGE, "missing", f"no snapshot was ever committed in {store.where()}")
    if options.step is None:
        steps = ", ".join(map(repr, steps_in(manifest)))
        raise CommandError(USAGE, "usage", f"say of which step (--step); these have state: {steps}")
    # States may have classes from modules beside the flow.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    saved = SavedState(store, manifest, options.step)
    if options.sql is not None:
        return _select(saved, options, out)
    if options.key is not None:
        return _one_key(saved, options.key, out)
    return _first_keys(saved, DEFAULT_LIMIT_KEYS if options.limit is None else options.limit, out)


def _one_key(saved: SavedState, typed: str, out: Output) -> int:
    from railgun.engine.controller.state_queries import key_typed

    key = key_typed(typed)
    row = saved.get(key)
    if row is None:
        raise CommandError(
            FAILED,
            "no-key",
            f"snapshot {saved.manifest.snapshot} has no state of the key {key!r} of step {saved.step!r}",
        )
    fields = _plain(row)
    out.data(snapshot=saved.manifest.snapshot, step=saved.step, **fields | {"key": key})
    out.line(
        json.dumps(fields["state"], ensure_ascii=False) if "state" in fields else fields["repr"]
    )
    return DONE


def _first_keys(saved: SavedState, limit: int, out: Output) -> int:
    keys = sum(saved.count().values())
    rows = [_plain(row) for row in islice(saved.rows(), limit)]
    out.data(snapshot=saved.manifest.snapshot, step=saved.step, keys=keys, rows=rows)
    if not out.as_json:
        out.show(view.rows(rows))
        more = f"; {len(rows):,} of them are shown (--limit)" if len(rows) < keys else ""
        out.line(f"snapshot {saved.manifest.snapshot}, step {saved.step}: {keys:,} keys{more}")
    return DONE


def _plain(row: Row) -> dict[str, Any]:
    from railgun.engine.snapshots.plain import from_json
    from railgun.engine.worker.state_queries import shown

    text, is_json = shown(row.state)
    state = {"state": from_json([text])[0]} if is_json else {"repr": text}
    return {
        "key": row.key,
        **state,
        "saved": row.snapshot,
        "worker": row.worker,
        "version": row.version,
        "ended": row.ended,
    }


def _select(saved: SavedState, options: argparse.Namespace, out: Output) -> int:
    """Load the state into a table in memory, and run the query of `--sql` on it."""
    import sqlite3

    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE state (key, state, saved INT, worker INT, ended INT)")
        database.executemany(
            "INSERT INTO state VALUES (?, ?, ?, ?, ?)",
            (
                (_cell(row.key), _cell(row.state), row.snapshot, row.worker, row.ended)
                for row in saved.rows()
            ),
        )
        try:
            cursor = database.execute(options.sql)
            names = [column[0] for column in cursor.description or ()]
            rows = cursor.fetchall() if options.limit is None else cursor.fetchmany(options.limit)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise CommandError(
                USAGE, "sql", f"{error}; the table is state (key, state, saved, worker, ended)"
            ) from error
    out.data(snapshot=saved.manifest.snapshot, step=saved.step, columns=names, rows=rows)
    out.show(view.table(names, rows))
    return DONE


def _cell(value: Any) -> Any:
    """Return a value for SQLite: numbers and text as they are, other JSON values as JSON text, all else by its repr."""
    from railgun.engine.worker.state_queries import shown

    if isinstance(value, str | float | None) or (
        isinstance(value, int) and -(1 << 63) <= value < 1 << 63
    ):
        return value
    return shown(value)[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the job, the key and the snapshot."""
    add_job_name(parser, nargs="?")
    parser.add_argument(
        "--step",
        metavar="STEP",
        help="show the state of this step (default: the only one with state)",
    )
    parser.add_argument(
        "--key", metavar="KEY", help=f"{KEY_HELP} (default: count the keys; with --dir, list some)"
    )
    parser.add_argument("--dir", metavar="DIR", help="read a snapshot in this directory")
    parser.add_argument(
        "--snapshot", type=number, metavar="N",
        help="with --dir: read the snapshot with this number (default: the latest)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=number, metavar="N",
        help=f"with --dir: list at most N keys (default: {DEFAULT_LIMIT_KEYS})",
    )  # fmt: skip
    parser.add_argument(
        "--sql", metavar="SELECT",
        help="with --dir: run this query on the table `state` (key, state, …) of the snapshot",
    )  # fmt: skip
