"""Store bytes in RocksDB that need not outlive the process: without a write-ahead log and without fsync.

This is the only module that uses rocksdict. docs/design/state.md explains why RocksDB was chosen, and its settings.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from railgun.engine.state.errors import StateError

MIN_CACHE_BYTES: Final = 8 << 20
MIN_BUFFER_BYTES: Final = 4 << 20
MAX_OPEN_FILES: Final = 256


class Rocks:
    """A RocksDB database in the directory `path`; `cache` and `buffers` bound its memory (bytes)."""

    def __init__(self, path: str, cache: int, buffers: int) -> None:
        self.path = path
        try:
            rocksdict: Any = importlib.import_module(
                "rocksdict"
            )  # some of its type stubs are wrong
        except ImportError as error:
            raise StateError(
                "state on disk needs rocksdict: pip install 'railgun[disk]', on every machine that runs workers"
            ) from error
        self._batch = rocksdict.WriteBatch
        self._bounds = rocksdict.ReadOptions
        options = _options(rocksdict, max(cache, MIN_CACHE_BYTES), max(buffers, MIN_BUFFER_BYTES))
        try:
            self._db = rocksdict.Rdict(path, options)
        except Exception as error:
            raise self._failed("opened", error) from error
        writing = rocksdict.WriteOptions()
        writing.disable_wal = True
        self._db.set_write_options(writing)

    def read(self, names: list[bytes]) -> list[bytes | None]:
        """Return the values of `names`, None for each name that is not stored. Raises `StateError`."""
        try:
            values: list[bytes | None] = self._db.get(names)
        except Exception as error:
            raise self._failed("read", error) from error
        return values

    def write(self, put: Mapping[bytes, bytes], delete: Iterable[bytes] = ()) -> None:
        """Store the items of `put` and delete the names of `delete`, in one atomic batch. Raises `StateError`."""
        batch = self._batch(raw_mode=True)
        for name, data in put.items():
            batch.put(name, data)
        for name in delete:
            batch.delete(name)
        try:
            self._db.write(batch)
        except Exception as error:
            raise self._failed("written", error) from error

    def scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Return an iterator over the items from `begin` up to but not including `end`, in order, as they are now."""
        bounds = self._bounds()
        bounds.set_iterate_upper_bound(end)
        try:
            rows: Iterator[tuple[bytes, bytes]] = self._db.items(from_key=begin, read_opt=bounds)
        except Exception as error:
            raise self._failed("read", error) from error
        return rows

    def close(self) -> None:
        """Close the files. Writes that are still buffered are lost."""
        self._db.close()

    def _failed(self, what: str, error: Exception) -> StateError:
        return StateError(
            f"the state in {self.path} could not be {what}: {error}. If the disk is full or slow, give another "
            "directory: OnDisk(directory=…)"
        )


def _options(rocksdict: Any, cache: int, buffers: int) -> Any:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    # Memory: the write buffers, the cached blocks and the filters all stay within the given bounds.
    options.set_db_write_buffer_size(buffers)
    options.set_write_buffer_size(max(1 << 20, buffers // 4))
    options.set_max_write_buffer_number(3)
    options.set_max_open_files(MAX_OPEN_FILES)
    tables = rocksdict.BlockBasedOptions()
    tables.set_block_cache(rocksdict.Cache(cache))
    tables.set_cache_index_and_filter_blocks(True)
    tables.set_pin_l0_filter_and_index_blocks_in_cache(True)
    tables.set_bloom_filter(10, False)  # answers most lookups of new keys
    tables.set_format_version(5)
    options.set_block_based_table_factory(tables)
    # Disk: the sizes of the levels follow the size of the data, so overwritten values take little space.
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_bytes_for_level_base(max(16 << 20, 2 * buffers))
    options.set_target_file_size_base(16 << 20)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options
