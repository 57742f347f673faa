"""Faults that benchmarks inject, and the load beside them."""
