"""A worker that ends in user code says where, on Spark as well."""

from __future__ import annotations

import os
import sys

import pytest

from railgun import Collect, Flow, FlowFailedError, Items, Settings
from railgun.job import run
from railgun.spark.session import SparkSession

pytestmark = pytest.mark.spark


def exits(n: int) -> int:
    if n == 7:
        os._exit(3)
    return n


def test_an_exit_in_user_code_names_step_function_and_first_record(spark: SparkSession) -> None:
    flow = Flow("lost")
    numbers = flow.source(Items(range(20)), name="numbers")
    numbers.map(exits, name="poison").sink(Collect(), name="out")
    settings = Settings(restarts=0)
    here = sys.modules[__name__]
    with (
        run(flow, 1, spark=spark, http=False, settings=settings, by_value=[here]) as job,
        pytest.raises(FlowFailedError) as told,
    ):
        job.wait(120)
    for word in ("step 'poison', function exits", "batch of 20 records that begins with 0"):
        assert word in str(told.value)
