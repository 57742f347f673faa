"""Text to tokens and back: chat template, tokenizer, response parser.

Must not import torch, gRPC or `libs.engine`.
"""
