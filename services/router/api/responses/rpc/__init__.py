"""Stored responses over gRPC: ResponseService, and the answers of Generate that are stored or go on.

What is stored is what `/v1/responses` stores. Must not import `aiohttp`, `http` or `routes`.
"""
