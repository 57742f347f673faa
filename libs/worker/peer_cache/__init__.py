"""Serves blocks of this worker's prefix cache to peers.

Must not import `offload`, `pins`, `process` or `restore`.
"""
