"""Reads the cached prefix of a prompt from peers and kvstores. `BlockFetcher` reads handoffs, too.

Must not import `offload`, `peer_cache` or `process`.
"""
