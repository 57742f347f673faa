"""Calls of the SDK that go on at another router when theirs is lost or full, blocking and awaited.

Must not import `batches`, `cli`, `jobs` or `responses`.
"""
