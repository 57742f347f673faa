"""Decisions about running requests: when to retry, hedge, quarantine, move and start.

Must not import `grpc`, `aiohttp`, `socket`, `admission`, `placement` or `workers`.
"""
