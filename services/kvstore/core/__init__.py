"""The block store of a node: puts, pins, metrics.

Must not import `app` or `service`.
"""
