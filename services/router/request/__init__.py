"""What a client asks for: request types, validation, and the way from text to token ids. Pure.

Must not import other packages of the router, nor anything that does I/O.
"""
