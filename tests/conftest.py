"""Share the tests out to processes, mark the slow ones (`./run test`, `./run test --all`), and offer databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.sinkserver.tables import Database

# Each takes tens of seconds: clusters of processes that are treated badly, servers of others, a Spark cluster.
SLOW_FILES = {
    "bench/test_bench.py",
    "broker/discovery/test_servers.py",
    "broker/server/test_orderly_stop.py",
    "client/test_frozen_node.py",
    "docs/test_operations.py",
    "ingest/test_killed_programs.py",
    "sinkserver/test_flows.py",
    "sinkserver/test_table_promises.py",
    "spark/test_demo.py",
    "spark/test_driver.py",
    "spark/test_standalone.py",
    "test_wheel.py",
    "verification/test_chaos.py",
    "verification/test_faults_single.py",
}
TESTS = Path(__file__).parent
assert all((TESTS / file).exists() for file in SLOW_FILES), "a slow file was renamed"

# A test is not wrong because the machine is busy: examples have no deadline of their own.
settings.register_profile("railgun", deadline=None)
settings.load_profile("railgun")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and share all out: those that need Spark to one process, the others by file.

    The largest group comes first, so that both processes are at work to the end.
    """
    for item in items:
        file = str(item.path.relative_to(TESTS))
        if item.get_closest_marker("simulation") or file in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        group = "spark" if item.get_closest_marker("spark") else file
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Run one PostgreSQL server for all tests that need it."""
    from tests.services.postgres import server

    with server() as made:
        yield made.url


@pytest.fixture
def postgres(postgres_url: str) -> Database:
    """Make a database of PostgreSQL."""
    import psycopg
    from tests.sinkserver.sinks import new
    from tests.sinkserver.tables import Database

    name = f"t{new()}"
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}".encode())
    return Database(postgres_url.rpartition("/")[0] + f"/{name}")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """Make a database, of SQLite and then of PostgreSQL."""
    from tests.sinkserver.tables import Database

    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path}/out.db")
    made: Database = request.getfixturevalue("postgres")
    return made
