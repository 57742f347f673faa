"""Events about stored and removed KV blocks: a node's log, the service that streams it, a watcher's view.

Must not import `cluster`, `etcd`, `rpc` or `transport`.
"""
