"""`spark.read.format("railgun-state")`: the state of a flow as a table, with nothing to register.

Spark looks for modules whose names begin with `pyspark_`, and imports all of them when a session first asks for any
format of Python. So this one is small, and imports Railgun when its table is asked for. See docs/state-tables.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from railgun.spark.state_table import Table


class DefaultSource(DataSource):
    """The format."""

    table: Table | None = None
    """What was found when its schema was asked for: from then on it is this snapshot, and no later one."""

    @classmethod
    def name(cls) -> str:
        """What it is called."""
        return "railgun-state"

    def schema(self) -> StructType:
        """Columns by what is in the state."""
        from railgun.spark.state_table import Table

        self.table = Table.of(self.options)
        return self.table.guessed()

    def reader(self, schema: StructType) -> DataSourceReader:
        """What plans the tasks and reads."""
        from railgun.spark.state_table import StateReader, Table

        guessed = self.table is not None
        return StateReader(self.table or Table.of(self.options), schema, guessed)
