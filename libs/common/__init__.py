"""Shared parts of all services: discovery, RPC, transfers, errors, bounds.

Must not import torch, `libs.engine`, `libs.worker` or `services`.
"""
