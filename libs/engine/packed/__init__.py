"""Weights in the kernels' form, in a file that the processes of a host map, and that a next start reads.

Must not import `core`, `eagle`, `model`, `parallel` or `scheduling`.
"""
