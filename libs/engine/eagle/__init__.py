"""EAGLE-3 draft heads.

Must not import `core` or `scheduling`.
"""
