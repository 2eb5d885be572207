"""From stream to stream: orders come in as messages, what each customer has spent so far goes out, exactly once.

./run railgun serve                                             (a node, in ./railgun-data)
./run railgun stream ensure orders                              (in another terminal)
./run railgun run examples/orders.py
echo '{"customer": "ada", "amount": 7}' | ./run railgun pub orders
./run railgun sub totals --follow
"""

from __future__ import annotations

from typing import Any

from railgun import Flow, Streams, StreamSink


def add(spent: int, order: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """One more order of a customer."""
    spent += order["amount"]
    return spent, {"customer": order["customer"], "spent": spent}


def orders_flow(**node: Any) -> Flow:
    """The flow; `node` says where the node is if it does not work in ./railgun-data."""
    flow = Flow("orders")
    orders = flow.source(Streams("orders", **node), name="orders")
    by_customer = orders.key_by(lambda order: order["customer"], name="by customer")
    totals = by_customer.stateful_map(add, initial=int, name="spent")
    totals.sink(StreamSink("totals", **node), name="totals")
    return flow


flow = orders_flow()
