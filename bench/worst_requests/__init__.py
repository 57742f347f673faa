"""Benchmark of the requests that cost a router most within the bounds, beside a healthy stream."""
