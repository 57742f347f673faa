"""The process: options, garbage collection, allocator, event loop, signals.

Must not import `cluster`, `etcd`, `http`, `kv_events`, `rpc` or `telemetry`.
"""
