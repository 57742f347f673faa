"""Files and batches in the SDK. `client.files` and `client.batches` have the calls.

Must not import `cli` or `responses`.
"""
