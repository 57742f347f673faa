"""The engine's thread, its pages and the queue for them.

Must not import `offload`, `peer_cache`, `pins`, `process` or `restore`.
"""
