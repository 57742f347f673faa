"""The reader's side of pins: leases on blocks of peers and kvstores.

Must not import `engine`, `offload`, `peer_cache`, `process` or `restore`.
"""
