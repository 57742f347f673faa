"""Requests as workers receive them: parsing and bounds, attempts, cached prompts, deadlines.

Must not import `engine`, `offload`, `peer_cache`, `pins`, `process` or `restore`.
"""
