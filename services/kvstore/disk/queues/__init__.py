"""Queues of one disk's reads and writes, and the threads that serve them.

Must not import `disk.tier`, `disk.set` or `disk.native`.
"""
