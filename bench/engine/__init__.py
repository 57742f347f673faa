"""Tokens per second of the engine alone, beside engines of others on the same weights."""
