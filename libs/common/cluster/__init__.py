"""The cluster's records: workers in discovery, placements of sessions, exit reports, drains.

Must not import `http`, `kv_events` or `transport`.
"""
