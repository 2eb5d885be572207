"""How many workers a Spark session has room for."""

from __future__ import annotations

from pathlib import Path

import pytest

from railgun import Collect, Flow, Generate
from railgun.engine.controller.controller import WorkersError
from railgun.job import run
from railgun.spark.session import SparkSession

pytestmark = pytest.mark.spark


def test_more_workers_than_a_local_master_has_slots_are_refused_and_the_flow_goes_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    flow = Flow("slots")
    numbers = flow.source(Generate(lambda index, chance: index, rate=100), name="numbers")
    numbers.sink(Collect(), name="out")
    with run(flow, 1, spark=spark, registry=tmp_path) as job:
        with pytest.raises(
            WorkersError, match=r"7 workers need 7 slots, and master local\[6\] has 6"
        ):
            job.scale(7)
        job.scale(2, wait=True, timeout=120)
        assert job.status()["goal"] == 2
