"""Python's types and functions as the schemas, answers and tools of requests.

Nothing here does I/O. Pydantic is used where a caller's type is one of its models, and never imported. Must
not import `calls`, `grpc`, `rpc` or `v1`.
"""
