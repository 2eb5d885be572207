"""Lets Spark find `format("railgun")`: it looks into every module whose name begins with `pyspark_`.

Spark imports this in each session, whether anybody reads a stream or not: what it takes to do so comes later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from railgun.spark.streams.source import StreamSource


class DefaultSource(DataSource):
    """Persistent streams of a node: see `railgun.spark.streams`."""

    @classmethod
    def name(cls) -> str:
        """What it is called in `format(...)` and `USING ...`."""
        return "railgun"

    def _source(self) -> StreamSource:
        from railgun.spark.streams.source import StreamSource

        return StreamSource(self.options)

    def schema(self) -> StructType | str:
        """Which columns there are if the user gives none."""
        return self._source().schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        return self._source().reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """For `spark.readStream`."""
        return self._source().streamReader(schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For `df.write`."""
        return self._source().writer(schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """For `df.writeStream`."""
        return self._source().streamWriter(schema, overwrite)
