"""The router: it admits requests, places them on workers and streams their tokens to clients.

Must not import torch, the engine or another service.
"""
