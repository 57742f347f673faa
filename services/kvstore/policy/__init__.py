"""Which block is evicted, admitted to disk, or over a tenant's share. Pure.

Must not import `asyncio`, `core`, `disk`, `dram`, `loading` or `pool`.
"""
