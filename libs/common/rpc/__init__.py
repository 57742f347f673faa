"""gRPC in one form for all services: dialing, serving, TLS, errors, tracing, metrics.

Must not import cluster, etcd, kv_events or transport, nor anything that knows a service's role.
"""
