"""Reads the cached prefix of a prompt from peers and kvstores.

Must not import `process`, `offload` or `peer_cache`.
"""
