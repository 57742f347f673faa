"""Writes new blocks to the kvstore in the background.

Must not import `process`, `restore` or `peer_cache`.
"""
