"""Store snapshots on disk: the state of a flow as Parquet files, and manifests that list the files of each snapshot.

This package reads and writes files only: it has no sockets, no event loop and no Spark. The controller decides when
snapshots are taken.
"""
