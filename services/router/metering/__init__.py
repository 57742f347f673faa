"""What requests cost, what tenants have used, and the limits that they may use.

Only `usage_store` and `lease_store` write to the database. Must not import `api` or `execution`.
"""
