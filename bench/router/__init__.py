"""Throughput and latency of the router between a load generator and fake workers."""
