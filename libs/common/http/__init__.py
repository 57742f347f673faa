"""HTTP below the routes: connections, malformed messages, who may call, and every service's admin port.

Must not import `cluster`, `etcd`, `kv_events` or `services`.
"""
