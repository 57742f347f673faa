"""Disk reads and writes in C, without the interpreter's lock."""
