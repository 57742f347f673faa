"""Encoded conversations, kept message by message: the next turn encodes its new messages only. Pure.

Must not import `asyncio`, `grpc`, `admission`, `execution` or `workers`.
"""
