"""The decode worker: KV of a prompt to tokens.

Must not import `drafter`, `kvstore`, `prefill` or `router`.
"""
