"""Stored responses over gRPC: their messages, and the answers of Generate that are stored or go on.

`rpc.response_service` serves them. Must not import `aiohttp`, `http`, `routes` or `rpc.server`.
"""
