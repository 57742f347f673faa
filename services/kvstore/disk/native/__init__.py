"""Disk reads and writes in C, without the interpreter's lock.

Must not import `core`, `loading`, `policy` or `pool`.
"""
