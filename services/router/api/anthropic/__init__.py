"""Anthropic's Messages API: bodies -> requests, and events of answers in its form.

Must not import `batches`, `jobs`, `responses`, `rpc` or `workers_ai`.
"""
