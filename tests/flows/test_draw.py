"""Pictures of flows."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from tests.flows.harness import Keys

from railgun import Collect, Flow, FlowError, Items

SVG = "{http://www.w3.org/2000/svg}"


def large() -> Flow:
    """Every kind of step, a step in two stages, a line that passes a column, names that need care."""
    flow = Flow("orders")
    orders = flow.source(Items(["1"]), name="orders")
    payments = flow.source(Items(["1"]), name='payments <raw> & "signed" #1 `x`')
    good, bad = orders.map(str.strip).branch(str.isdigit, name="valid?")
    bad.sink(Collect(), name="rejected")
    by_id = good.key_by(int, name="order by id")
    paid_by_id = payments.map(str).key_by(int, name="payment by order")
    matched = by_id.union(paid_by_id, name="both").stateful(Keys(), name="match " * 20)
    paid, unpaid = matched.branch(bool)
    paid.key_by(str, name="by customer").reduce(max, name="total").sink(Collect(), name="totals")
    audited = bad.union(unpaid).map(str, name="audit")
    audited.key_by(str, name="by region").reduce(max).sink(Collect())
    far = unpaid.key_by(str, name="東京と大阪")
    orders.key_by(str, name="raw").reduce(max).union(far).reduce(min).sink(
        Collect(), name="far sink"
    )
    return flow


def test_a_form_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        FlowError, match="'orders' can be drawn as 'mermaid' or 'svg', not as 'png'"
    ):
        large().draw("png")


def test_mermaid_shows_every_step_in_each_of_its_stages() -> None:
    text = large().draw()
    lines = text.splitlines()
    assert lines[0] == "flowchart LR"
    stages = [line for line in lines if "subgraph" in line]
    assert len(stages) == len(large().plan().stages)
    assert sum('"audit<br>' in line for line in lines) == 2
    assert sum("-->|no|" in line for line in lines) == 4
    nodes = re.findall(r"^ +(n\d+)[\[({>]", text, re.MULTILINE)
    used = re.findall(r"n\d+", " ".join(line for line in lines if "-->" in line))
    assert len(set(nodes)) == len(nodes)
    assert set(used) == set(nodes)


def test_names_in_mermaid_are_quoted() -> None:
    text = large().draw("mermaid")
    assert "payments #60;raw#62; #38; #34;signed#34; #35;1 #96;x#96;" in text
    assert all(line.count('"') in (0, 2) for line in text.splitlines())


def test_svg_is_well_formed_and_needs_nothing_else() -> None:
    text = large().draw("svg")
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    titles = {t.text for t in root.iter(f"{SVG}title")}
    assert 'payments <raw> & "signed" #1 `x`' in titles
    assert "href" not in text
    assert "<style" not in text


def test_boxes_of_the_svg_do_not_overlap_and_lie_within_it() -> None:
    root = ElementTree.fromstring(large().draw("svg"))
    wide, high = float(root.get("width", 0)), float(root.get("height", 0))
    stages, nodes = [], []
    for rect in root.findall(f"{SVG}rect"):
        if rect.get("rx") == "12":
            stages.append(box(rect))
    for rect in root.findall(f"{SVG}g/{SVG}rect"):
        nodes.append(box(rect))
    assert len(stages) == len(large().plan().stages)
    for boxes in (stages, nodes):
        assert all(x >= 0 and y >= 0 and x + w <= wide and y + h <= high for x, y, w, h in boxes)
        assert not any(overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(any(within(node, stage) for stage in stages) for node in nodes)


def test_no_line_between_stages_crosses_a_step() -> None:
    root = ElementTree.fromstring(large().draw("svg"))
    nodes = [box(rect) for rect in root.findall(f"{SVG}g/{SVG}rect")]
    lines = [p.get("d", "") for p in root.findall(f"{SVG}path") if "Q" in p.get("d", "")]
    assert len(lines) >= 7
    for line in lines:
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", line)]
        points = list(zip(numbers[::2], numbers[1::2], strict=True))
        for (ax, ay), (bx, by) in pairwise(points[1:-1]):
            piece = (min(ax, bx), min(ay, by), abs(bx - ax), abs(by - ay))
            assert not any(overlap(piece, node) for node in nodes), line


def test_a_flow_of_one_step_is_drawn() -> None:
    flow = Flow("tiny")
    flow.source(Items([1]), name="in").sink(Collect(), name="out")
    assert ElementTree.fromstring(flow.draw("svg")).tag == f"{SVG}svg"


Box = tuple[float, float, float, float]


def box(rect: ElementTree.Element) -> Box:
    x, y, w, h = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
    return x, y, w, h


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]


def within(a: Box, b: Box) -> bool:
    return (
        b[0] <= a[0] and a[0] + a[2] <= b[0] + b[2] and b[1] <= a[1] and a[1] + a[3] <= b[1] + b[3]
    )
