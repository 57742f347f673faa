"""The engine's interface and the records of one step.

Must not import `core`, `eagle`, `kernels`, `kv`, `model`, `model_spec`, `packed`, `parallel`, `sampling` or
`scheduling`.
"""
