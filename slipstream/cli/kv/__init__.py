"""`slipstream kv`: the blocks of the KV store nodes.

Must not import `autoscale`, `jobs` or `top`.
"""
