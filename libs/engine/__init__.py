"""The inference engine: tokens, KV pages and steps.

Must not import `grpc`, `aiohttp`, `structured`, `text`, `worker` or `services`.
"""
