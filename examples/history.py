"""Three years of history, then live: what each customer has spent. docs/batch.md tells how to run it.

The history is a table, in `history/`. What is new comes as lines of JSON in files of `orders/`. Both are made by

    python examples/history.py make
    python examples/history.py order ada 1250
"""

import json
import sys
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from railgun import Directory, Files, Flow

Order = dict[str, Any]
Spent = dict[str, Any]


def add(spent: Spent, order: Order) -> tuple[Spent, Spent]:
    """What a customer has spent so far, and since when."""
    spent = {
        "orders": spent["orders"] + 1,
        "cents": spent["cents"] + order["cents"],
        "since": spent["since"] or order["day"],
    }
    return spent, {"customer": order["customer"], **spent}


flow = Flow("history")
orders = flow.source(Directory("orders", "*.jsonl", format="json", watch=True), name="orders")
spent = orders.key_by(lambda order: order["customer"], name="by customer").stateful_map(
    add, initial=lambda: {"orders": 0, "cents": 0, "since": None}, name="spent"
)
spent.sink(Files("spent"), name="out")


def make(a_day: int = 1_000, days: int = 3 * 365) -> None:
    """Three years of orders, in a file a month; ordered by nothing in particular."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    months: dict[str, list[Order]] = {}
    number = 0
    for day in (date(2023, 1, 1) + timedelta(days=n) for n in range(days)):
        rows = months.setdefault(f"{day:%Y-%m}", [])
        for _ in range(a_day):
            number += 1
            who = f"c{number * 7919 % 5_000}"
            rows.append({"number": number, "customer": who, "cents": number % 900, "day": f"{day}"})
    for directory in ("history", "orders"):
        Path(directory).mkdir(exist_ok=True)
    for month, rows in months.items():
        rows.sort(key=lambda order: order["number"] * 31 % 997)
        pq.write_table(pa.Table.from_pylist(rows), f"history/{month}.parquet")
    print(f"{number:,} orders in history/, {len(months)} files")


def order(customer: str, cents: str) -> None:
    """A new order: a file that appears whole."""
    told = {"customer": customer, "cents": int(cents), "day": f"{date.today()}"}
    draft = Path("orders") / f".{time.time_ns()}"
    draft.write_text(json.dumps(told) + "\n")
    draft.rename(draft.with_name(f"{draft.name[1:]}.jsonl"))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make"]:
            make()
        case ["order", customer, cents]:
            order(customer, cents)
        case _:
            print(__doc__)
