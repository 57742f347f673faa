"""Kernels in Triton for a CUDA device; Triton's interpreter runs the same programs on a CPU in tests.

Nothing else imports this package unless a device is asked for: Triton is an optional dependency. Must not
import `core`, `kv`, `model` or `packed`.
"""
