"""Pins over gRPC: their names, and the stream that holds them.

Must not import `access`, `health` or `serve`.
"""
