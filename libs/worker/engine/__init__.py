"""The engine's thread, its pages and the queue for them.

May import `requests` only.
"""
