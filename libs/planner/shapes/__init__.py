"""Shapes of models from their `config.json`: bytes, multiplications and KV of each layer.

Must not import `cards`, `cuts`, `fit` or `plan`.
"""
