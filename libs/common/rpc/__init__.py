"""gRPC in one form for all services: dialing, serving, TLS, errors, tracing, metrics.

Must not import `cluster`, `etcd`, `http`, `kv_events` or `transport`.
"""
