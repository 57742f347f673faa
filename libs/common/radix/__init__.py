"""A radix tree with payload and a byte budget per tenant, for every cache of prompt prefixes. Pure.

Must not import `asyncio`, `grpc`, `rpc` or `transport`.
"""
