"""Lines of logs, which services and tools of the SDK share.

Must not import `calls`, `cli`, `credentials` or `rpc`.
"""
