"""Run a flow over bounded inputs, one shuffle per stage. Nothing here imports Spark, which runs these tasks."""
