"""Weights in the kernels' form, in a file that the processes of a host map, and that a next start reads.

Knows tensors by name and nothing of models: it must not import libs.engine.model or anything above it.
"""
