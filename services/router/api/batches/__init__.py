"""OpenAI's files and batches: JSONL in, one answer a line out.

Lines run as jobs. Must not import `anthropic`, `jobs`, `responses` or `workers_ai`.
"""
