"""How the tests are shared out to processes (`./run test`): those that need Spark to one, the others by file."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The largest group first, so that both processes are at work to the end."""
    for item in items:
        group = "spark" if item.get_closest_marker("spark") else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)
