"""Register the format `railgun-state`, which reads the state of a flow as a table.

Spark looks for modules whose names begin with `pyspark_`, and imports all of them when a session first uses a Python
data source. So this module is small, and imports Railgun only when its table is used. See docs/state-tables.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from railgun.spark.state_table import Table


class DefaultSource(DataSource):
    """The format `railgun-state`."""

    table: Table | None = None
    """The table whose schema was read: from then on its snapshot is fixed, and later ones are ignored."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)` and `USING ...`."""
        return "railgun-state"

    def schema(self) -> StructType:
        """Return the columns, inferred from the state."""
        from railgun.spark.state_table import Table

        self.table = Table.of(self.options)
        return self.table.inferred_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader that plans the tasks and reads the rows."""
        from railgun.spark.state_table import StateReader, Table

        inferred = self.table is not None
        return StateReader(self.table or Table.of(self.options), schema, inferred)
