"""Which holders have the KV of a prompt prefix, from their reports and from recent placements. Pure.

Must not import `asyncio`, `grpc`, `time`, `admission`, `execution`, `placement`, `request` or `workers`.
"""
