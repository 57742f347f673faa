"""Queues of one disk's reads and writes, and the threads that serve them.

Must not import `native`, `set` or `tier`.
"""
