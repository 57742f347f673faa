"""Jobs in the SDK: requests that a cluster runs when it has room. `client.jobs` has the calls.

Must not import `batches`, `cli` or `responses`.
"""
