"""Snapshots on disk: the state of a flow as Parquet files, and manifests that say which of them belong together.

Files only: no sockets, no event loop, no Spark. Who takes snapshots, and when, is decided above.
"""
