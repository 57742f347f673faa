"""Shared parts of prefill and decode workers, around an engine.

Must not import `services`.
"""
