"""The engine: the loop that admits, schedules, runs and commits steps.

The top of the engine; no other package of it may import `core`.
"""
