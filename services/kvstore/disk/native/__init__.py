"""Disk reads and writes in C, outside of the interpreter's lock."""
