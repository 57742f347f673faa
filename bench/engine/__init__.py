"""Tokens per second of the engine alone, beside transformers on the same weights."""
