"""Benchmarks: one module each, with a `main(argv) -> int`. `python -m bench` lists them."""
