"""Which sequences run in a step, and how they share prefixes.

Must not import `core`, `model` or `kernels`.
"""
