"""JSON Schema as llguidance has to see it, and what of it no grammar holds.

Pure functions of the schema. Must not import `torch`, `grpc` or `aiohttp`.
"""
