"""Channels to a cluster: dialling, TLS, back-off, errors of calls.

Must not import other modules of `slipstream` but `credentials`, `errors` and `v1`.
"""
