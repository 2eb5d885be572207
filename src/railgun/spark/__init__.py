"""Railgun on Spark.

The only package that imports pyspark, so that everything else runs and is tested without a JVM.
"""
