"""The router: it admits requests, places them on workers and streams their tokens to clients.

Must not import `torch`, `libs.engine`, `decode`, `drafter`, `kvstore` or `prefill`.
"""
