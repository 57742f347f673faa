"""Bytes of protobuf messages, read within the bounds of their structure. Pure.

Must not import `asyncio`, `grpc`, `callers` or `server`.
"""
