"""Blocks on their way between the tiers.

Must not import `core`, `pool` or `unreachable`.
"""
