"""How the tests are shared out to processes, and which of them are slow (`./run test`, `./run test --all`)."""

from __future__ import annotations

import pytest

# Each takes tens of seconds: clusters of processes that are treated badly, servers of others, a Spark cluster.
SLOW_FILES = {
    *("test_bench.py", "test_chaos.py", "test_servers.py", "test_faults_single.py"),
    *("test_operations.py", "test_standalone.py", "test_table_promises.py"),
    *("test_demo.py", "test_driver.py", "test_frozen_node.py", "test_killed_programs.py"),
    *("test_orderly_stop.py", "test_flows.py"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and share all out: those that need Spark to one process, the others by file.

    The largest group comes first, so that both processes are at work to the end.
    """
    for item in items:
        if item.get_closest_marker("simulation") or item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        group = "spark" if item.get_closest_marker("spark") else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)
