"""`railgun sink list`, `drop` and `moved`: inspect and correct the data directory of a stopped sink.

They help when a transaction can never be committed, because its file is damaged or the target refuses it. Such a
transaction blocks its flow and step for good, and only people can decide that its records may be lost.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from railgun.cli.errors import DONE, FAILED, NO_NODE, USAGE, CommandError
from railgun.cli.node import confirm
from railgun.cli.output import Output
from railgun.errors import said
from railgun.ingest.errors import SinkError
from railgun.sinkserver.ledger import Ledger, Txn, job_of
from railgun.storage.errors import LockedError
from railgun.storage.lock import FileLock
from railgun.transport.registry import Registry

_WORDS: Final = {
    "open": "is being sent",
    "prepared": "waits for its flow",
    "decided": "waits for the target",
}


def list_(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """List the transactions that wait, and what each waits for."""
    with _open_ledger(options) as ledger:
        waiting = list(ledger.txns.values())
        out.data(target=ledger.target, transactions=[_as_data(txn) for txn in waiting])
        for txn in waiting:
            what = job_of(txn.origin) if txn.state == "open" else _describe(txn)
            state = "is damaged" if txn.damaged else _WORDS[txn.state]
            out.line(f"{txn.id} {state}: {what}", "red" if txn.damaged else "")
        if not waiting:
            out.line(f"{options.data}: nothing waits")
    return DONE


def drop(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Give up a transaction: its records are lost, and its flow continues without them."""
    with _open_ledger(options) as ledger:
        txn = ledger.txns.get(options.id)
        if txn is None:
            raise CommandError(
                FAILED, "no-transaction", f"no transaction {options.id} waits in {options.data}"
            )
        what = _describe(txn)
        confirm(options, out, f"delete {what} for good, and report them to the flow as committed")
        ledger.give_up(txn)
        out.data(dropped=_as_data(txn))
        out.line(f"dropped {txn.id}: {what} are lost")
    return DONE


def moved(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Forget the name of the target, so that the next start of the sink sets a new one."""
    with _open_ledger(options) as ledger:
        before = ledger.target
        confirm(
            options,
            out,
            f"let the next sink in {options.data} write to a target other than {before}",
        )
        ledger.set_target("")
        waiting = [txn for txn in ledger.txns.values() if txn.state != "open"]
        out.data(was=before, transactions=[_as_data(txn) for txn in waiting])
        out.line(
            f"{options.data}: the next start of the sink sets the target; so far it was {before}"
        )
        for txn in waiting:
            out.line(f"{txn.id} goes to the new target, too: {_describe(txn)}")
    return DONE


@contextlib.contextmanager
def _open_ledger(options: argparse.Namespace) -> Iterator[Ledger]:
    directory = Path(options.data).absolute()
    if not (directory / "ledger").exists():
        raise CommandError(USAGE, "no-sink", f"no sink has worked in {directory}")
    ledger = Ledger(directory)
    try:
        lock = FileLock(directory / "lock")
        try:
            ledger.open()
            yield ledger
        finally:
            ledger.close()
            lock.release()
    except LockedError as error:
        raise CommandError(
            NO_NODE, "in-use", f"a sink works in {directory}: stop it first"
        ) from error
    except SinkError as error:
        raise CommandError(FAILED, error.code.lower(), str(error)) from error
    except OSError as error:
        raise CommandError(FAILED, "disk", f"{directory}: {said(error)}") from error


def _as_data(txn: Txn) -> dict[str, Any]:
    names = "id flow step store state generation snapshot worker alone count end damaged"
    return {name: getattr(txn, name) for name in names.split()}


def _describe(txn: Txn) -> str:
    """Describe the records of a transaction."""
    return f"{txn.count:,} records of {job_of(txn.origin)} for snapshot {txn.snapshot}"
