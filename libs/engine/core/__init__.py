"""The engine: the loop that admits, schedules, runs and commits steps.

Must not import `worker` or `services`.
"""
