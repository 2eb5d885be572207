"""Persistent streams as a data source of Spark: `spark.read.format("railgun")`, and the three others.

`source` is what Spark finds; `reader` and `writer` are what it asks for work. Reading: `feed` brings batches of the
node, `columns` and `decode` make Arrow of them. Writing: `encode` makes payloads of Arrow, `staging` keeps what a task
has written, and `commit` publishes it, exactly once.
"""
