"""Shared parts of all services: discovery, RPC, transfers, errors, bounds.

Must not import `torch`, `engine`, `worker` or `services`.
"""
