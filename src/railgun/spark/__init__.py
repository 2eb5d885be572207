"""Run flows on Spark: the launcher of workers, batch runs, data sources and state tables.

Only this package imports pyspark, so that everything else runs and is tested without a JVM.
"""

from railgun.lazy import need_extra

need_extra("pyspark")
