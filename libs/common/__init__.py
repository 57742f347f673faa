"""Shared parts of all services: discovery, serving, transfers, telemetry, settings, bounds.

`slipstream/` has what clients share as well: dialling, TLS, tokens, errors. Must not
import `torch`, `engine`, `worker` or `services`.
"""
