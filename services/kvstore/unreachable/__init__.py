"""Finds and drops blocks that no look-up reaches, because those before them in their chain are gone.

Must not import `core`, `loading` or `pool`.
"""
