"""Which sequences run in a step, and how they share prefixes.

Must not import `core`, `eagle`, `kernels`, `model` or `parallel`.
"""
