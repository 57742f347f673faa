"""A client's request: its types, its validation, and its encoding from text to token ids. Pure.

Must not import other packages of the router, nor anything that does I/O.
"""
