"""How a body becomes requests, and their events one answer, whatever the API. Knows no HTTP connection.

Must not import `anthropic`, `batches`, `jobs`, `openai`, `responses`, `rpc` or `workers_ai`.
"""
