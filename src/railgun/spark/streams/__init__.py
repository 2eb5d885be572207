"""Read and write persistent streams with Spark: the format `railgun` of `spark.read`, `df.write` and streaming queries.

`source` is the class that Spark finds; `reader` and `writer` do its work. Reading: `feed` fetches batches from the
node, `columns` and `decode` turn them into Arrow. Writing: `encode` turns Arrow into payloads, `staging` has what a
task has written, and `commit` publishes it, exactly once.
"""
