"""A worker process from its start to its end.

The top of the worker library; its other packages must not import it.
"""
