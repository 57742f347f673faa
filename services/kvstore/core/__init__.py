"""The block store of a node: puts, pins, metrics.

Must not import `services.kvstore.service` or `app`.
"""
