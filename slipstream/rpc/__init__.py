"""Channels to a cluster: dialling, TLS, back-off, errors of calls.

Must not import `batches`, `calls`, `cli`, `jobs`, `metering` or `responses`.
"""
