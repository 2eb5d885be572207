"""Three years of history, then live: the revenue of each customer.

The history is a table; what is new comes as files of JSON into a directory. See docs/batch.md.
"""

from typing import Any

from railgun import Directory, Files, Flow

Order = dict[str, Any]


def add(revenue: dict[str, Any], order: Order) -> tuple[dict[str, Any], Order]:
    """What a customer has spent, and since when."""
    revenue = {
        "orders": revenue["orders"] + 1,
        "cents": revenue["cents"] + order["cents"],
        "since": revenue["since"] or order["day"],
    }
    return revenue, {"customer": order["customer"], **revenue}


flow = Flow("history")
orders = flow.source(Directory("orders", "*.jsonl", format="json", watch=True), name="orders")
revenue = orders.key_by(lambda order: order["customer"], name="by customer").stateful_map(
    add, initial=lambda: {"orders": 0, "cents": 0, "since": None}, name="revenue"
)
revenue.sink(Files("revenue"), name="out")
