"""The costs of requests, the usage of tenants, and their limits.

Only `usage_store` and `lease_store` write to the database. Must not import `api`, `execution`, `jobs` or
`workers`.
"""
