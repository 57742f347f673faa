"""A client for etcd: keys, compare-and-swap, leases, watches, fail-over between members.

Must not import `cluster`, `http`, `kv_events`, `rpc` or `telemetry`.
"""
