"""Register the format `railgun`: Spark imports every module whose name begins with `pyspark_`.

Spark imports this module in each session, whether a stream is read or not. So its own imports come later, when needed.
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
    """The format `railgun`: persistent streams of a broker, see `railgun.spark.streams`."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)` and `USING ...`."""
        return "railgun"

    def _source(self) -> StreamSource:
        from railgun.spark.streams.source import StreamSource

        return StreamSource(self.options)

    def schema(self) -> StructType | str:
        """Return the columns that the format has if the user gives no schema."""
        return self._source().schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for `spark.read`."""
        return self._source().reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the reader for `spark.readStream`."""
        return self._source().streamReader(schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer for `df.write`."""
        return self._source().writer(schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the writer for `df.writeStream`."""
        return self._source().streamWriter(schema, overwrite)
