"""The inference engine: tokens, KV pages and steps.

Must not import gRPC, HTTP, `libs.text`, `libs.worker` or `services`.
"""
