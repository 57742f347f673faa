"""Structured output: grammars over the model's vocabulary, and the tokens they allow.

Knows llguidance and `libs.text`. Must not import `torch`, `grpc`, `aiohttp`, `engine` or `worker`.
"""
