"""The prefill worker: prompts to KV blocks and a first token.

Must not import `decode`, `drafter`, `kvstore` or `router`.
"""
