"""Engines of others, each in a process of its own with the Python of a venv of its own.

Must not import anything of the project beside this package: that Python does not have what the project needs.
"""
