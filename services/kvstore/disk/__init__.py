"""The disk tier.

Must not import `core`, `loading`, `pool` or `unreachable`.
"""
