"""KV pages: their cache, their manager, the sequences that hold them.

Must not import `core`, `eagle`, `kernels`, `model`, `model_spec`, `packed`, `parallel` or `scheduling`.
"""
