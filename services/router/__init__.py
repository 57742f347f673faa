"""The router: takes requests in, places them on workers, delivers their tokens.

Must not import torch or another service.
"""
