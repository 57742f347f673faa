"""Libraries of the services, and the planner of `slipstream plan`. ARCHITECTURE.md has their layers.

Must not import `services` or `supervisor`.
"""
