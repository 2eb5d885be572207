"""Check a recorded history again: `python -m verification.faults check FILE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verification.faults.anomalies import MEANINGS
from verification.faults.checker import check, is_sound
from verification.faults.history import HistoryError, read, to_line


def main(argv: Sequence[str] | None = None) -> int:
    """Check the named histories; return 0 if all are sound, 1 if one is not, 2 if one cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m verification.faults", description="Histories of fault runs, checked."
    )
    parser.add_argument("what", choices=["check"], help="command to run")
    parser.add_argument("files", nargs="+", type=Path, help="histories (JSON, a record a line)")
    parser.add_argument("--evidence", action="store_true", help="with the records that show it")
    options = parser.parse_args(argv)
    code = 0
    for file in options.files:
        try:
            records = read(file)
        except (OSError, HistoryError) as error:
            print(f"{file}: {error}", file=sys.stderr)
            return 2
        findings = check(records)
        sound = is_sound(findings)
        code = code if sound else 1
        print(f"{file}: {len(records):,} records, {'sound' if sound else 'NOT SOUND'}")
        for kind, count in sorted(findings.counts.items()):
            print(f"  {count:,} x {kind}: {MEANINGS[kind]}")
        for anomaly in findings.found:
            print(f"  {anomaly}")
            if options.evidence:
                for record in anomaly.evidence:
                    print(f"    {to_line(record)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
