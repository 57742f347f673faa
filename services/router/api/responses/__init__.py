"""OpenAI's Responses API: bodies and items -> requests, events of answers, and stored responses.

Must not import `anthropic`, `batches`, `jobs` or `workers_ai`.
"""
