"""Libraries of the services: common, engine, text, worker.

Must not import `services` or `supervisor`.
"""
