"""Amounts of money, limits of keys, and what was used, as routers and clients state them.

Must not import `async_client`, `calls`, `client` or `cli`.
"""
