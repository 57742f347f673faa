"""Text to tokens and back: chat template, tokenizer, response parser.

Must not import `torch`, `grpc`, `aiohttp`, `engine` or `structured`.
"""
