"""Draft heads: EAGLE-3 chains and block drafters.

Must not import `core`, `parallel` or `scheduling`.
"""
