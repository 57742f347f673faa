"""A worker process from its start to its end.

Must not import `services`.
"""
