"""KV pages: their cache, their manager, the sequences that hold them.

May import `sampling` and `step` only.
"""
