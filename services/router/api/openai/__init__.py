"""Requests and responses in the shapes of OpenAI's HTTP API.

Must not import `aiohttp`, `anthropic`, `batches`, `http`, `jobs`, `responses`, `rpc` or `workers_ai`.
"""
