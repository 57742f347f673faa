"""Durable tables of the services: SQLite in one file, or PostgreSQL, chosen by URL.

Each module that stores something declares its own tables. Must not import `torch`, `grpc`, `aiohttp`,
`engine`, `structured`, `text` or `worker`.
"""
