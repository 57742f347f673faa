"""A client's request: its types, its validation, and its encoding from text to token ids. Pure.

Must not import `aiohttp`, `grpc`, `api`, `execution`, `metering`, `placement` or `workers`.
"""
