"""One PostgreSQL server for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.connector.postgres import server


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with server() as made:
        yield made.url
