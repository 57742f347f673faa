"""Which slot of a disk holds which block. Pure.

Must not import `asyncio`, `native` or `queues`.
"""
