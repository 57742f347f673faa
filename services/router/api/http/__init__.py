"""The middleware around every public HTTP handler, and the handlers that run requests.

Must not import `anthropic`, `batches`, `description`, `jobs`, `responses`, `rpc` or `workers_ai`.
"""
