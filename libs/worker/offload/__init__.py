"""Writes new blocks to the kvstore in the background.

Must not import `peer_cache`, `process` or `restore`.
"""
