"""The inference engine: tokens, KV pages and steps.

An encoder of images will be a package `vision` beside `model`. Must not import `grpc`, `aiohttp`,
`structured`, `text`, `worker` or `services`.
"""
