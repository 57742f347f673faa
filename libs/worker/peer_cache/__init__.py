"""Serves blocks of this worker's prefix cache to peers.

May import `engine` and `requests` only.
"""
