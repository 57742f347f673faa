"""Benchmarks: each module or package with a `main` is a command, `python -m bench.NAME`."""
