"""Webhooks of jobs: where they may go, and how they are signed, sent and repeated.

Must not import `executor`, `puller` or `store`.
"""
