"""Decode steps on fixed buffers of a device, captured as one CUDA graph a bucket of sequences.

Must not import `core`, `eagle`, `packed`, `parallel` or `scheduling`.
"""
