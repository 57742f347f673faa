"""Reads the cached prefix of a prompt from peers and kvstores. `BlockFetcher` reads handoffs, too.

Must not import `process`, `offload` or `peer_cache`.
"""
