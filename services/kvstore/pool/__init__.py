"""Memory that the nodes share through Mooncake Store.

Must not import `core` or `disk`.
"""
