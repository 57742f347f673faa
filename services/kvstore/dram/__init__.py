"""The memory tier.

Must not import `core`, `disk`, `loading`, `pool` or `unreachable`.
"""
