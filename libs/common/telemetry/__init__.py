"""A process's reports of itself: metrics, logs, traces.

Must not import `cluster`, `etcd`, `http`, `kv_events`, `rpc` or `transport`.
"""
