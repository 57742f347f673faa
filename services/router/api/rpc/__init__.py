"""RouterService and ResponseService over gRPC: their methods, and messages of Generate as requests.

Must not import `aiohttp`, `anthropic`, `batches`, `jobs` or `workers_ai`.
"""
