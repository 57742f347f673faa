"""Events about stored and removed KV blocks: a node's log, and the service that streams it.

`slipstream/block_view.py` is a watcher's view. Must not import `cluster`, `etcd`, `rpc` or
`transport`.
"""
