"""Segment files: reads, writes, recovery.

Must not import `native`, `queues` or `policy`.
"""
