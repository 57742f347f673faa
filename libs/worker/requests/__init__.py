"""Requests as workers receive them: parsing and bounds, attempts, cached prompts, deadlines.

Must not import the packages of libs/worker that use it (engine, lending, pins, process, restore).
"""
