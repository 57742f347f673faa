"""Where the KV of each prompt prefix is, by what workers report and what was just sent to them. Pure.

Must not import other packages of the router, nor anything that does I/O.
"""
