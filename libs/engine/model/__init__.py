"""A model from its checkpoint to a forward pass.

Must not import `core`, `eagle`, `parallel` or `scheduling`.
"""
