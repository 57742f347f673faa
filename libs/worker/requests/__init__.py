"""Requests as workers receive them: parsing and bounds, attempts, cached prompts, deadlines.

Must not import the packages of libs/worker that use it (engine, peer_cache, pins, process, restore).
"""
