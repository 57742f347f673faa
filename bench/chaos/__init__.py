"""Chaos on a real cluster of the shipped model: faults under load, every answer compared, and what is left.

Imports the SDK, the supervisor and bench's helpers; nothing imports it.
"""
