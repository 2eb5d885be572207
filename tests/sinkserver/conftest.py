"""One PostgreSQL server for all tests that need it, and databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.services.postgres import server
from tests.sinkserver.sinks import new
from tests.sinkserver.tables import Database


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with server() as made:
        yield made.url


@pytest.fixture
def postgres(postgres_url: str) -> Database:
    name = f"t{new()}"
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}".encode())
    return Database(postgres_url.rpartition("/")[0] + f"/{name}")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path}/out.db")
    made: Database = request.getfixturevalue("postgres")
    return made
