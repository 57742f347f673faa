"""The shape of a model: configuration, matrices, layers, the plan of a batch.

Must not import `core`, `eagle`, `kernels`, `model`, `packed`, `parallel` or `scheduling`.
"""
