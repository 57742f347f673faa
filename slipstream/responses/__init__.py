"""Stored responses in the SDK: `client.responses` has the calls.

Must not import `batches`, `cli` or `jobs`.
"""
