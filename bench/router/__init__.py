"""Throughput and latency of the router before fake workers."""
