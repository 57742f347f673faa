"""The operators' console of a router: requests, placements, the fleet and its caches, as JSON and pages.

Mounted on the admin port (ports of `api`). What it shows of requests is recorded by `recording`. Must not
import `admission`, `autoscale`, `metering` or `request`.
"""
