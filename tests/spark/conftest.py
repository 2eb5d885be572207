"""A node for each file that writes streams, and one Spark session for all tests: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.spark.stream_writing import Clock, Writing

from railgun.client.sync import SyncClient, connect_sync
from railgun.spark.session import SparkSession, session
from railgun.testing.node import Served, served


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    made = session("railgun tests", "local[6]", quick=True)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("node"), clock) as made:
        yield made


@pytest.fixture(scope="module")
def client(node: Served) -> Iterator[SyncClient]:
    with connect_sync(data=node.data) as made:
        yield made


@pytest.fixture
def writing(spark: SparkSession, node: Served) -> Writing:
    return Writing(spark, node)
