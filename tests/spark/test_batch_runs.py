"""Batch runs on real Spark: DataFrames in, DataFrames out; handing over to a live flow; what is refused."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from tests.engine.batch.random_flows import draw, rows
from tests.engine.batch.test_batch_and_live import live, sinks, told
from tests.engine.operators.test_lateness import LATENESS, Judged, drawn, late_by_hand
from tests.engine.operators.test_lateness import expected as judged_by_hand

import railgun
from railgun import (
    DONE,
    BatchError,
    Collect,
    Context,
    Directory,
    Files,
    Flow,
    Input,
    Items,
    Parquet,
    State,
    Stateful,
)  # fmt: skip
from railgun.engine.worker.liveness import HungCallError
from railgun.flows.flow import Stream
from railgun.flows.plan import DEAD
from railgun.spark import lateness
from railgun.spark.session import SparkSession
from railgun.testing.local_workers import SubprocessLauncher

pytestmark = pytest.mark.spark
HERE = [
    sys.modules[__name__],
    sys.modules["tests.engine.operators.test_lateness"],
]  # which workers cannot import
run = partial(railgun.run, launcher=SubprocessLauncher(), http=False, by_value=HERE)
run_batch = partial(railgun.run_batch, by_value=HERE)
Order = dict[str, Any]


def totals_flow(**options: Any) -> Flow:
    flow = Flow("totals", **options)
    orders: Stream[Any] = flow.source(Items([]), name="orders")
    by = orders.key_by(lambda order: order["who"], lambda order: order["amount"], name="by who")
    by.reduce(lambda a, b: a + b, name="total").with_key().sink(Collect(), name="out")
    return flow


@pytest.fixture(scope="module")
def orders(spark: SparkSession) -> DataFrame:
    return spark.range(0, 1000, 1, 5).selectExpr("concat('c', id % 7) as who", "id as amount")


def largest(df: DataFrame) -> dict[str, int]:
    return {row[0]: row[1] for row in df.groupBy("_1").agg(F.max("_2")).collect()}


def expected(n: int = 1000) -> dict[str, int]:
    return {f"c{k}": sum(range(k, n, 7)) for k in range(7)}


# ------------------------------------------------------------ what comes out


def test_a_fold_over_a_table(spark: SparkSession, orders: DataFrame) -> None:
    out = run_batch(totals_flow(), spark, {"orders": orders})["out"]
    assert out.count() == 1000
    assert largest(out) == expected()


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [1, 2, 13])
def test_however_many_partitions_there_are(
    spark: SparkSession, orders: DataFrame, partitions: int
) -> None:
    out = run_batch(totals_flow(), spark, {"orders": orders.repartition(3)}, partitions=partitions)
    assert largest(out["out"]) == expected()


@pytest.mark.slow
def test_flows_drawn_by_chance_give_what_they_give_live(spark: SparkSession) -> None:
    for seed in range(1000, 1005):
        flow = draw(random.Random(seed), text=True)
        fed = rows(random.Random(seed), 40, 5)
        df = spark.createDataFrame(fed, "key long, n long, time long, what string").repartition(3)
        schemas = dict.fromkeys((s for s in sinks(flow) if s != DEAD), "value string")
        out = run_batch(flow, spark, {"s0": Input(df, order_by="time")}, schemas=schemas)
        wanted = live(flow, fed)
        for sink in schemas:
            assert told([row["value"] for row in out[sink].collect()]) == wanted[sink], (seed, sink)
        assert out[DEAD].count() == sum(wanted[DEAD].values())


def test_records_come_in_the_order_of_a_column(spark: SparkSession) -> None:
    scrambled = spark.range(0, 500, 1, 7).selectExpr("id % 3 as k", "500 - id as at").repartition(5)
    flow = Flow("ordered")
    rows_in: Stream[Any] = flow.source(Items([]), name="rows")
    keyed = rows_in.key_by(itemgetter("k"))
    keyed.stateful_map(falls, initial=lambda: -1).sink(Collect(), name="out")
    for column in ("at", "cast(at as double)", "cast(at as timestamp)", "lpad(at, 5, '0')"):
        df = scrambled.selectExpr("k", "at", f"{column} as when")
        out = run_batch(flow, spark, {"rows": Input(df, order_by="when")}, partitions=3)["out"]
        assert out.where("value").count() == 0, column
    assert run_batch(flow, spark, {"rows": scrambled})["out"].where("value").count() > 0


@pytest.mark.parametrize("order", ["number", "text", ["high", "number"]], ids=str)
@pytest.mark.parametrize("way", ["columns", "items", "function"])
def test_the_late_records_of_an_ordered_table_are_those_of_one_part(
    spark: SparkSession, way: str, order: str | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lateness, "BUCKET_COUNT", 7)
    records = [(0, number, key, time) for _, number, key, time in drawn(5, 400)]
    df = spark.createDataFrame(records, "part long, number long, key long, time long")
    columns = ["*", "lpad(number, 5, '0') as text", "number div 100 as high"]
    df = df.selectExpr(*columns).repartition(5)

    def as_record(row: Order) -> tuple[int, int, int, int]:
        return row["part"], row["number"], row["key"], row["time"]

    flow = Flow("late")
    times: Callable[[Any], int] = itemgetter("time")
    if way == "function":
        times = lambda row: row["time"] + 0  # noqa: E731
    rows_in: Stream[Any] = flow.source(
        Items([]), name="rows", time=times, lateness=LATENESS / 1_000_000
    )
    if way == "items":
        rows_in = rows_in.map(lambda row: row)
    keyed = rows_in.key_by(itemgetter("key")).map(as_record)
    told_of = keyed.stateful(Judged(), name="judged").map(repr)
    told_of.sink(Collect(), name="out")
    given = {"rows": Input(df, order_by=order)}
    out = run_batch(flow, spark, given, schemas={"out": "value string"}, partitions=3)["out"]
    assert len(late_by_hand(records)) > 30
    found = sorted(row["value"] for row in out.collect())
    assert found == sorted(map(repr, judged_by_hand(records)))


def falls(before: int, row: Order) -> tuple[int, bool]:
    return row["at"], row["at"] < before


def test_branches_unions_and_several_sinks(spark: SparkSession, orders: DataFrame) -> None:
    flow = Flow("several")
    first: Stream[Any] = flow.source(Items([]), name="first")
    second: Stream[Any] = flow.source(Items([]), name="second")
    small, large = first.branch(lambda order: order["amount"] < 500)
    small.map(lambda order: order["amount"]).sink(Collect(), name="small")
    left = large.key_by(lambda order: order["who"])
    right = second.key_by(lambda order: order["who"])
    left.union(right).stateful(Sides()).sink(Collect(), name="sides")
    out = run_batch(flow, spark, {"first": orders, "second": orders})
    assert set(out) == {"small", "sides"}
    assert out["small"].agg(F.sum("value")).collect()[0][0] == sum(range(500))
    found = {row["who"]: (row["left"], row["right"]) for row in out["sides"].collect()}
    amounts = range(1000)
    assert found == {
        f"c{k}": (sum(1 for a in amounts if a >= 500 and a % 7 == k), len(amounts[k::7]))
        for k in range(7)
    }


class Sides(Stateful[str, Order, list[int], dict[str, Any]]):
    """Counts what comes from each side; tells at the end."""

    def initial(self) -> list[int]:
        return [0, 0]

    def on_item(self, item: Order, context: Context[str, list[int]]) -> None:
        context.state[context.port] += 1

    def on_end(self, context: Context[str, list[int]]) -> Iterator[dict[str, Any]]:
        left, right = context.state
        yield {"who": context.key, "left": left, "right": right}


class Sessions(Stateful[str, Order, list[int], tuple[str, int]]):
    """Sums until nothing comes for ten seconds: told by a timer, which counts on being called in time."""

    def initial(self) -> list[int]:
        return []

    def on_item(self, item: Order, context: Context[str, list[int]]) -> None:
        if context.state:
            context.cancel_timer(context.state[0])
            context.state.pop(0)
        context.state.insert(0, context.time + 10_000_000)
        context.state.append(item["amount"])
        context.set_timer(context.state[0])

    def on_timer(self, context: Context[str, list[int]]) -> Iterator[tuple[str, int]]:
        yield context.key, sum(context.state[1:])
        context.forget()


def sessions_flow() -> Flow:
    flow = Flow("sessions")
    clicks: Stream[Any] = flow.source(Items([]), name="clicks", time=itemgetter("at"))
    clicks.key_by(itemgetter("who")).stateful(Sessions(), name="sessions").sink(
        Collect(), name="out"
    )
    return flow


def test_timers_fire_as_time_goes_by(spark: SparkSession) -> None:
    seconds = [0, 3, 9, 30, 35, 70]
    clicks = [("ada", at * 1_000_000, at) for at in seconds] + [("bob", 1, 5)]
    df = spark.createDataFrame(clicks, "who string, at long, amount long").repartition(4)
    given = {"clicks": Input(df, order_by="at")}
    out = run_batch(sessions_flow(), spark, given, schemas={"out": "who string, sum long"})["out"]
    found = sorted(map(tuple, out.collect()))
    assert found == [("ada", 12), ("ada", 65), ("ada", 70), ("bob", 5)]


def test_a_skewed_key_and_more_rows_than_are_held_at_once(spark: SparkSession) -> None:
    df = spark.range(0, 300_000, 1, 4).selectExpr(
        "if(id % 100 < 99, 'hot', concat('c', id)) as who", "1 as amount"
    )
    out = run_batch(totals_flow(), spark, {"orders": df}, partitions=3)["out"]
    assert out.agg(F.max("_2")).collect()[0][0] == 297_000


def test_items_of_rows(spark: SparkSession) -> None:
    flow = Flow("lines")
    lines = flow.source(Items(["to be"]), name="lines")
    words = lines.flat_map(str.split).key_by(str)
    words.stateful_map(lambda n, w: (n + 1, (w, n + 1)), initial=int).sink(Collect(), name="out")
    text = spark.createDataFrame([("to be or",), ("not to be",)], "value string")
    other = text.selectExpr("value as line")
    for given in (text, Input(other, item=lambda row: row["line"])):
        found = {tuple(row) for row in run_batch(flow, spark, {"lines": given})["out"].collect()}
        assert found == {("to", 1), ("to", 2), ("be", 1), ("be", 2), ("or", 1), ("not", 1)}


def test_dead_letters_are_a_table(spark: SparkSession, orders: DataFrame) -> None:
    flow = Flow("letters", dead_letters=Collect(), on_error="dead_letter")
    rows_in: Stream[Any] = flow.source(Items([]), name="orders")
    rows_in.map(lambda order: 1 // (order["amount"] % 100), name="divide").sink(
        Collect(), name="out"
    )
    out = run_batch(flow, spark, {"orders": orders})
    letters = out[DEAD].collect()
    assert len(letters) == 10
    assert {row["step"] for row in letters} == {"divide"}
    assert "ZeroDivisionError" in letters[0]["error"]
    assert out["out"].count() == 990


def test_state_on_disk(spark: SparkSession, orders: DataFrame) -> None:
    assert (
        largest(run_batch(totals_flow(state="disk"), spark, {"orders": orders})["out"])
        == expected()
    )


def test_the_session_is_the_callers(spark: SparkSession, orders: DataFrame) -> None:
    before = dict(spark.sparkContext.getConf().getAll()), sql_settings(spark)
    run_batch(totals_flow(), spark, {"orders": orders})["out"].count()
    assert (dict(spark.sparkContext.getConf().getAll()), sql_settings(spark)) == before
    assert spark.range(1).count() == 1


def sql_settings(spark: SparkSession) -> dict[str, str]:
    return {row["key"]: row["value"] for row in spark.sql("SET").collect()}


# ------------------------------------------------------------ handing over


def live_flow(name: str, place: Path, watch: bool = False) -> Flow:
    flow = Flow(name)
    source: Directory[Any] = Directory(place / "live", format="json", watch=watch)
    orders = flow.source(source, name="orders")
    orders.key_by(lambda order: order["who"], name="by").stateful_map(
        add, initial=int, name="total"
    ).sink(Files(place / "out"), name="out")
    return flow


def add(total: int, order: Order) -> tuple[int, Order]:
    total += order["amount"]
    return total, {"who": order["who"], "total": total}


def lines(place: Path) -> list[str]:
    return sorted(line for file in place.glob("*.jsonl") for line in file.read_text().splitlines())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "live").mkdir()
    return tmp_path


def go_on(flow: Flow, place: Path, workers: int = 3) -> None:
    with run(flow, workers, snapshots=str(place / "snaps")) as job:
        assert job.wait(60)


def test_history_then_live(spark: SparkSession, orders: DataFrame, place: Path) -> None:
    flow = live_flow("then", place)
    given = {"orders": Input(orders, positions={"old.jsonl": DONE})}
    where = str(place / "snaps")
    result = run_batch(flow, spark, given, snapshot_to=where, into_sinks=["out"])
    assert result == {}
    assert result.snapshot == 1
    assert len(lines(place / "out")) == 1000
    (place / "live" / "old.jsonl").write_text('{"who": "c1", "amount": 1000000}\n')
    (place / "live" / "new.jsonl").write_text('{"who": "c1", "amount": 1}\n')
    go_on(flow, place)
    after = lines(place / "out")
    assert len(after) == 1001  # the file that was done is not read again
    assert f'{{"who":"c1","total":{expected()["c1"] + 1}}}' in after


def test_outputs_are_of_the_very_run_that_is_saved(
    spark: SparkSession, orders: DataFrame, place: Path
) -> None:
    once = orders.withColumn("amount", F.expr("amount + cast(rand() * 1000 as long)"))
    flow = live_flow("very", place)
    # There is nothing in the source yet: where it begins need not be said.
    result = run_batch(flow, spark, {"orders": once}, snapshot_to=str(place / "snaps"))
    from railgun import state_table

    found = {
        row["who"]: row[1] for row in result["out"].groupBy("who").agg(F.max("total")).collect()
    }
    state = state_table(spark, str(place / "snaps"), "total")
    assert {row["key"]: row["state"] for row in state.collect()} == found
    result.unpersist()


def test_what_is_used_when_nothing_is_kept_any_more_is_written_nowhere(
    spark: SparkSession, orders: DataFrame, place: Path
) -> None:
    flow = live_flow("again", place)
    step = flow.steps["total"]
    flow.add("sink", "Collect", "seen", (step,), step.where, sink=Collect())
    given = {"orders": Input(orders, positions={})}
    where = place / "snaps"
    result = run_batch(flow, spark, given, snapshot_to=str(where), into_sinks=["out"])
    files = sorted(where.rglob("*.parquet"))
    result.unpersist()
    assert result["seen"].count() == 1000
    assert len(lines(place / "out")) == 1000
    assert sorted(where.rglob("*.parquet")) == files
    assert not list((place / "out").rglob("*-sealed*"))


def test_a_source_read_by_itself_goes_on_where_it_was(spark: SparkSession, place: Path) -> None:
    growing = place / "live" / "a.jsonl"
    growing.write_text('{"who": "ada", "amount": 5}\n{"who": "ada", "amo')
    (place / "live" / "b.jsonl").write_text('{"who": "bob", "amount": 1}\n' * 20_000)
    flow = live_flow("itself", place, watch=True)
    where = str(place / "snaps")
    run_batch(flow, spark, {"orders": "source"}, snapshot_to=where, into_sinks="out")
    assert len(lines(place / "out")) == 20_001
    with growing.open("a") as file:
        file.write('unt": 7}\n')
    with run(flow, 2, snapshots=where) as job:
        wait_for(lambda: job.status()["snapshots"]["count"] > 0 and job.state("total", "ada") == 12)
        assert job.stop(timeout=60)
    assert '{"who":"ada","total":12}' in lines(place / "out")
    assert len(lines(place / "out")) == 20_002


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except Exception:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_timers_that_are_not_due_go_live(spark: SparkSession, place: Path) -> None:
    clicks = [("ada", 0, 1), ("bob", 95_000_000, 2), ("ada", 30_000_000, 4)]
    df = spark.createDataFrame(clicks, "who string, at long, amount long")
    flow = sessions_flow()
    given = {"clicks": Input(df, order_by="at", positions={})}
    schemas = {"out": "who string, sum long"}
    where = str(place / "snaps")
    result = run_batch(flow, spark, given, schemas=schemas, snapshot_to=where)
    assert sorted(map(tuple, result["out"].collect())) == [("ada", 1), ("ada", 4)]
    result.unpersist()
    with run(flow, 2, snapshots=where) as job:
        assert job.wait(60)
        assert job.collected("out") == [("bob", 2)]


def test_a_run_that_fails_leaves_nothing_to_go_on_from(
    spark: SparkSession, orders: DataFrame, place: Path
) -> None:
    flow = live_flow("fails", place)
    bad = orders.withColumn("amount", F.expr("if(amount = 900, null, amount)"))
    where = str(place / "snaps")
    with pytest.raises(BatchError, match=r"^step 'total': add raised"):
        run_batch(
            flow, spark, {"orders": Input(bad, positions={})}, snapshot_to=where, into_sinks=["out"]
        )
    assert lines(place / "out") == []
    good = {"orders": Input(orders, positions={})}
    assert run_batch(flow, spark, good, snapshot_to=where, into_sinks=["out"]).snapshot == 2
    assert len(lines(place / "out")) == 1000


class Hanging(Files):
    """Files of which one method does not return until a file is there."""

    def __init__(self, directory: Path, method: str, released: Path) -> None:
        super().__init__(directory)
        self.method, self.released = method, released

    def hang(self, method: str) -> None:
        while method == self.method and not self.released.exists():
            time.sleep(0.01)

    def commit(self, token: Any) -> None:
        self.hang("commit")
        super().commit(token)

    def recover_at(self, place: Any, tokens: Any) -> None:
        self.hang("recover")
        super().recover_at(place, tokens)


@pytest.mark.parametrize("method", ["commit", "recover"])
def test_a_sink_that_hangs_is_named_and_holds_up_nothing_else(
    spark: SparkSession, orders: DataFrame, place: Path, method: str
) -> None:
    released, where = place / "released", str(place / "snaps")
    flow = Flow("hangs")
    records: Stream[Any] = flow.source(Items([]), name="orders")
    whole = records.map(lambda order: {"amount": order["amount"]}, name="amounts")
    whole.sink(Hanging(place / "stuck", method, released), name="stuck")
    whole.sink(Files(place / "out"), name="good")
    given = {"orders": Input(orders, positions={})}
    into = ["stuck", "good"]
    try:
        with pytest.raises((BatchError, HungCallError)) as hung:
            run_batch(flow, spark, given, snapshot_to=where, into_sinks=into, hang_after=0.5)
    finally:
        released.touch()
    text = str(hung.value)
    assert f"it is in step 'stuck', function Hanging.{method}" in text
    assert "in hang" in text, "its stack"
    if method == "recover":
        assert run_batch(flow, spark, given, snapshot_to=where, into_sinks=into).snapshot == 2
    else:
        assert "for the token {" in text
        assert "snapshot 1 is saved, but not all output is visible yet" in text
        assert len(lines(place / "out")) == 1000, "the other sink has committed"
        with run(flow, 2, snapshots=where) as job:
            assert job.wait(60)
    assert len(lines(place / "out")) == len(lines(place / "stuck")) == 1000


def test_initial_state_from_a_table(spark: SparkSession, place: Path) -> None:
    (place / "live" / "new.jsonl").write_text('{"who": "ada", "amount": 1}\n')
    table = spark.createDataFrame([("ada", 100), ("bob", 7)], "key string, state long")
    flow = live_flow("initial", place)
    where = str(place / "snaps")
    with run(flow, 2, snapshots=where, initial_state={"total": table}) as job:
        assert job.wait(60)
    assert lines(place / "out") == ['{"who":"ada","total":101}']


def test_initial_state_of_other_columns(spark: SparkSession, place: Path) -> None:
    (place / "live" / "new.jsonl").write_text('{"who": "ada", "amount": 1}\n')
    table = spark.createDataFrame([("ada", 40, 2)], "customer string, a long, b long")
    given = State(table, key="customer", state=lambda row: row["a"] + row["b"])
    flow = live_flow("columns", place)
    where = str(place / "snaps")
    with run(flow, 2, snapshots=where, initial_state={"total": given}) as job:
        assert job.wait(60)
    assert lines(place / "out") == ['{"who":"ada","total":43}']


# ------------------------------------------------------------ what is refused


def refused(spark: SparkSession, flow: Flow, inputs: dict[str, Any], **options: Any) -> str:
    with pytest.raises(BatchError) as caught:
        run_batch(flow, spark, inputs, **options)
    return str(caught.value)


def test_what_is_wrong_is_told_before_anything_runs(
    spark: SparkSession, orders: DataFrame, place: Path
) -> None:
    flow = totals_flow()
    renamed = orders.withColumnRenamed("who", "customer")
    assert "source 'orders' has no input" in refused(spark, flow, {})
    assert "'other', and flow 'totals' has no such source" in refused(
        spark, flow, {"orders": orders, "other": orders}
    )
    missing = refused(spark, flow, {"orders": renamed})
    assert "step 'by who' takes column 'who'" in missing
    assert "it has 'customer', 'amount'" in missing
    arrays = orders.withColumn("who", F.array("who"))
    assert "step 'by who' takes its key from column 'who', and a array<string> cannot" in refused(
        spark, flow, {"orders": arrays}
    )
    assert "ordered by column 'when'" in refused(spark, flow, {"orders": Input(orders, "when")})
    assert "no such sink: it has 'out'" in refused(
        spark, flow, {"orders": orders}, schemas={"outt": "a long"}
    )
    assert "schema of sink 'out'" in refused(spark, flow, {"orders": orders}, schemas={"out": "?"})
    assert "is a DataFrame, not [1]" in refused(spark, flow, {"orders": [1]})
    timed = sessions_flow()
    clicks = spark.createDataFrame([("a", "b", 1)], "who string, at string, amount long")
    assert "takes its time from column 'at', which is string" in refused(
        spark, timed, {"clicks": clicks}
    )
    nothing = orders.where("amount < 0")
    assert "sink 'out' gets nothing of the first" in refused(spark, flow, {"orders": nothing})
    assert "partition, not 0" in refused(spark, flow, {"orders": orders}, partitions=0)


def test_what_is_wrong_with_handing_over(
    spark: SparkSession, orders: DataFrame, place: Path
) -> None:
    flow = live_flow("wrong", place)
    where = str(place / "snaps")
    (place / "live" / "a.jsonl").write_text('{"who": "ada", "amount": 1}\n')
    assert "source 'orders' needs positions from which it goes on" in refused(
        spark, flow, {"orders": orders}, snapshot_to=where
    )
    same = spark.read.json(str(place / "live"))
    assert "reads 'a.jsonl' of the same directory" in refused(
        spark, flow, {"orders": Input(same, positions={})}, snapshot_to=where
    )
    given = {"orders": Input(orders, positions={})}
    assert "sink 'out' is given twice" in refused(
        spark, flow, given, snapshot_to=where, into_sinks=["out", "out"]
    )
    assert "no sink 'nowhere'" in refused(
        spark, flow, given, snapshot_to=where, into_sinks=["nowhere"]
    )
    assert "can be written to only with a snapshot" in refused(
        spark, flow, given, into_sinks=["out"]
    )
    assert "is Collect" in refused(
        spark, totals_flow(), given, snapshot_to=where, into_sinks=["out"]
    )
    run_batch(flow, spark, given, snapshot_to=where).unpersist()
    assert "has snapshots of 'wrong' already" in refused(spark, flow, given, snapshot_to=where)


def test_initial_state_that_does_not_fit(
    spark: SparkSession, orders: DataFrame, place: Path
) -> None:
    flow = live_flow("unfit", place)

    def start(step: str, table: Any) -> str:
        where = str(place / "snaps")
        with pytest.raises(BatchError) as caught:
            run(flow, 1, snapshots=where, initial_state={step: table})
        return str(caught.value)

    good = spark.createDataFrame([("ada", 1), ("ada", 2)], "key string, state long")
    assert "step 'sum' is not in the flow; the steps with state are 'total'" in start("sum", good)
    assert "has no column 'key' for its keys: it has 'who', 'amount'" in start("total", orders)
    assert "has columns for keys, and none for their state" in start("total", good.select("key"))
    assert "has two rows of key 'ada'" in start("total", good)


def test_an_item_that_does_not_fit_the_schema(spark: SparkSession, orders: DataFrame) -> None:
    out = run_batch(
        totals_flow(), spark, {"orders": orders}, schemas={"out": "who int, total long"}
    )
    with pytest.raises(PySparkException, match=r"sink 'out' cannot write .* column 'who'"):
        out["out"].collect()


def test_parquet_sinks_say_their_columns(
    spark: SparkSession, orders: DataFrame, place: Path
) -> None:
    import pyarrow as pa

    flow = Flow("columns")
    schema = {"who": pa.string(), "twice": pa.float64()}
    rows_in: Stream[Any] = flow.source(Items([]), name="orders")
    rows_in.map(lambda order: (order["who"], 2 * order["amount"])).sink(
        Parquet(place / "out", schema), name="out"
    )
    out = run_batch(flow, spark, {"orders": orders})["out"]
    assert out.dtypes == [("who", "string"), ("twice", "double")]
    assert out.count() == 1000
