"""One admitted request from its first attempt to its last release: retries, hedging, failover.

Must not import `api`, `autoscale`, `console`, `jobs` or `operators`.
"""
