"""The shape of a model: configuration, matrices, layers, the plan of a batch.

Must not import `kernels`, `model` or `core`.
"""
