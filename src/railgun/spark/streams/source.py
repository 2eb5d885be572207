"""The class that Spark finds for `format("railgun")`, which makes readers and writers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from railgun.client.payloads import PayloadError
from railgun.spark.streams.decode import BYTES_SCHEMA, first_schema
from railgun.spark.streams.errors import BadOptionError, StreamSourceError
from railgun.spark.streams.feed import connected
from railgun.spark.streams.options import Options
from railgun.spark.streams.reader import BatchReader, MicroBatchReader, described, place
from railgun.spark.streams.writer import BatchWriter, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )


class StreamSource(DataSource):
    """The format `railgun`: persistent streams of a node."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)` and `USING ...`."""
        return "railgun"

    def schema(self) -> StructType | str:
        """Return the columns that the format has if the user gives no schema."""
        options = Options.of(self.options)
        if options.schema is not None:
            return options.schema
        if options.format == "bytes":
            return BYTES_SCHEMA
        if options.format == "arrow":
            return _schema_of_first_message(options)
        raise BadOptionError(
            f'{options}: format json needs to know the columns: .schema("customer STRING, amount BIGINT"), or the '
            "option schema"
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for `spark.read`."""
        return BatchReader(Options.of(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return the reader for `spark.readStream`."""
        return MicroBatchReader(Options.of(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer for `df.write`."""
        return BatchWriter(Options.of(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the writer for `df.writeStream`."""
        return StreamWriter(Options.of(self.options), schema, overwrite)


def _schema_of_first_message(options: Options) -> StructType:
    """Return the columns of the first message in the stream."""
    with connected(options.address(), str(options), options.timeout) as client:
        status = described(client, options)
        at = max(place(options, "start", options.start, status), status["first"])
        if at >= status["end"]:
            raise StreamSourceError(
                f"{options}: there is no message yet to take the columns from: give a schema"
            )
        with client.subscribe(options.stream, start=at, prefetch=1) as reader:
            payload = reader.records(options.timeout).payload(0)
    try:
        return from_arrow_schema(first_schema(payload))
    except PayloadError as error:
        raise StreamSourceError(f"{options}, offset {at}: {error}") from error
