"""The computation of a layer, in C and in torch, behind one interface.

Must not import `core`, `eagle`, `kv`, `model`, `packed`, `parallel` or `scheduling`.
"""
