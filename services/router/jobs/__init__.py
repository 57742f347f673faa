"""Jobs: requests that wait in a database until the cluster has room for them (docs/jobs.md).

What runs a job's body comes in as an executor. Must not import `api`, `console` or `workers`.
"""
