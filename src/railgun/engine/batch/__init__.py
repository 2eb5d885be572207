"""Batch runs: a flow over bounded inputs, one shuffle a stage. It knows nothing of Spark, which runs it."""
