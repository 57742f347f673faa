"""RouterService over gRPC: its methods, and its messages as requests.

Must not import `aiohttp`, `anthropic`, `batches`, `jobs` or `workers_ai`.
"""
