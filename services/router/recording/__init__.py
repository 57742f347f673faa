"""The records of a router's last requests, for its operators: times, workers and placements, never text.

Pure: no I/O. Must import nothing of the router but `placement`. Must not import `asyncio`, `grpc`, `time`,
`api`, `execution`, `request` or `workers`.
"""
