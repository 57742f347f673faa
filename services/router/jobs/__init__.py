"""Jobs: requests that wait in a database until the cluster has room for them (docs/jobs.md).

Must not import the APIs: what runs a job's body comes in as an executor.
"""
