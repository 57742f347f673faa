"""The KV store: blocks in memory, in a shared pool and on disks.

Must not import `torch`, `libs.engine`, `decode`, `drafter`, `prefill` or `router`.
"""
