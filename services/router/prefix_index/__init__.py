"""Which holders have the KV of a prompt prefix, from their reports and from recent placements. Pure.

Must not import other packages of the router, nor anything that does I/O.
"""
