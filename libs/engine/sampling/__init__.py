"""From logits to tokens: sampling, draft verification, stop conditions.

Must not import `core`, `eagle`, `kernels`, `kv`, `model`, `model_spec`, `packed`, `parallel` or
`scheduling`.
"""
