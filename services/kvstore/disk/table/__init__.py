"""Which slot of a disk holds which block, and which block goes next. Pure.

Must not import `asyncio`, `native`, `queues` or `segments`.
"""
