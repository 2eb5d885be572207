"""One Spark session for all tests that need one: it takes seconds to start, and a process has only one JVM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from railgun.spark.session import SparkSession, session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    made = session("railgun tests", "local[6]", quick=True)
    yield made
    made.stop()
