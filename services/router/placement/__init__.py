"""Which workers run a request, by predicted milliseconds. Pure: no I/O, no clock.

Must not import `asyncio`, `grpc`, `time`, `admission`, `execution`, `prefix_index`, `request` or `workers`.
"""
