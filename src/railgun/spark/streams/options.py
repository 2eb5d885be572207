"""Read and check the options of `format("railgun")`, once; never show their secret.

Rules:

1. A value that an option cannot have is refused when Spark plans, not when a task runs.
2. Spark and its catalogs add options of their own, so an unknown option is no error; but an option whose name is close
   to a known one is taken for a mistake, and refused.
3. Relative paths begin where the driver runs, and files are read there: their contents are sent to executors.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, cast

from railgun.client.address import DATA, SECRET, Address
from railgun.client.checks import MAX_OFFSET
from railgun.client.errors import StreamsError
from railgun.client.retries import call_with_retries
from railgun.errors import said
from railgun.spark.streams.errors import BadOptionError, StreamSourceError

NAMES: Final = (
    "stream", "path", "node", "secret", "secretFile", "certificate", "data", "timeout", "format", "schema",
    "start", "end", "missing", "partitions", "maxMessages", "batchRows", "delivery", "query", "batch", "rowsPerMessage",
)  # fmt: skip
FORMATS: Final = ("bytes", "json", "arrow")
Format = Literal["bytes", "json", "arrow"]
At = int | Literal["start", "end"]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a stream that is read or written.

    >>> Options.of({"stream": "orders", "partitions": "4"}).partitions
    4
    >>> Options.of({"stream": "orders", "fromat": "json"})
    Traceback (most recent call last):
    railgun.spark.streams.errors.BadOptionError: railgun, stream 'orders': there is no option 'fromat'; ...
    """

    stream: str
    node: str | None = None
    secret: str | None = field(default=None, repr=False)
    secret_file: str | None = None
    certificate: str | None = None
    data: str = DATA
    timeout: float = 30.0
    format: Format = "bytes"
    schema: str | None = None
    start: At = "start"
    end: At = "end"
    missing: Literal["error", "skip"] = "error"
    partitions: int | None = None
    max_messages: int | None = None
    batch_rows: int = 100_000
    delivery: Literal["exactly-once", "at-least-once"] = "exactly-once"
    query: str | None = None
    batch: int | None = None
    rows_per_message: int = 10_000

    def __str__(self) -> str:
        return f"railgun, stream {self.stream!r}"

    @staticmethod
    def of(options: Mapping[str, str]) -> Options:
        """Return the options from texts with names in any case, as Spark passes them."""
        values = _Values({name.lower(): value for name, value in options.items()})
        return Options(
            stream=values.stream,
            node=values.get("node"),
            secret=values.get("secret"),
            secret_file=values.get("secretFile"),
            certificate=values.get("certificate"),
            data=str(Path(values.get("data") or DATA).absolute()),
            timeout=values.number("timeout", 30.0),
            format=cast("Format", values.choice("format", FORMATS)),
            schema=values.get("schema"),
            start=values.place("start"),
            end=values.place("end"),
            missing=cast("Any", values.choice("missing", ("error", "skip"))),
            partitions=values.count("partitions"),
            max_messages=values.count("maxMessages"),
            batch_rows=values.count("batchRows") or 100_000,
            delivery=cast("Any", values.choice("delivery", ("exactly-once", "at-least-once"))),
            query=values.get("query"),
            batch=values.count("batch", least=0),
            rows_per_message=values.count("rowsPerMessage") or 10_000,
        )

    def address(self) -> Address:
        """Return where the node is. Call this on the driver: the address can be sent to executors.

        If the node worked in the directory `data` and is gone now, wait for it; raise `StreamSourceError` after
        `timeout` seconds.
        """
        try:
            secret = self.secret
            if secret is None and self.secret_file is not None:
                secret = Path(self.secret_file).read_text("ascii").strip()
            was_there = self.node is None and (Path(self.data) / SECRET).exists()
            address = call_with_retries(
                lambda: Address.find(self.node, secret=secret, data=self.data),
                timeout_s=self.timeout if was_there else 0.0,
            )
            if self.certificate is not None:
                address = replace(address, certificate=Path(self.certificate).read_text("ascii"))
        except StreamsError as error:
            raise StreamSourceError(
                f"{self}: {said(error)}. Set the options node and secret (or secretFile), or data to the node's "
                "directory"
            ) from error
        except (OSError, ValueError) as error:
            raise BadOptionError(f"{self}: secretFile or certificate: {said(error)}") from error
        return address


class _Values:
    """The options that the user has set."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        name = options.get("stream") or options.get("path")
        if not name:
            raise BadOptionError(
                'railgun: which stream? Give the option stream, or load("orders"). Spark 4.3 keeps no options of '
                "tables: use CREATE TEMPORARY VIEW, or SELECT ... FROM name WITH (stream = 'orders')"
            )
        self.stream = name
        names = {option.lower(): option for option in NAMES}
        for option in options:
            close = difflib.get_close_matches(option, names, 1, 0.8)
            if option not in names and close and not option.startswith("option."):
                raise BadOptionError(
                    f"railgun, stream {name!r}: there is no option {option!r}; did you mean {names[close[0]]!r}?"
                )

    def get(self, name: str) -> str | None:
        return self._options.get(name.lower()) or None

    def choice(self, name: str, among: tuple[str, ...]) -> str:
        value = self.get(name) or among[0]
        if value not in among:
            raise self._wrong(name, " or ".join(map(repr, among)))
        return value

    def count(self, name: str, least: int = 1) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        number = int(value) if value.isdecimal() and len(value) < 20 else -1
        if not least <= number < MAX_OFFSET:
            raise self._wrong(name, f"a number from {least} to {MAX_OFFSET - 1}")
        return number

    def number(self, name: str, otherwise: float) -> float:
        value = self.get(name)
        if value is None:
            return otherwise
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e9:
            raise self._wrong(name, "a number of seconds")
        return number

    def place(self, name: Literal["start", "end"]) -> At:
        value = self.get(name) or name
        if value == "start" or value == "end":
            return cast("At", value)
        if not value.isdecimal():
            raise self._wrong(name, "'start', 'end' or an offset")
        return int(value)

    def _wrong(self, name: str, right: str) -> BadOptionError:
        return BadOptionError(
            f"railgun, stream {self.stream!r}: option {name} is {right}, not {self.get(name)!r}"
        )
