"""The service of a router for operators: it shows the fleet, and passes their calls on to its processes.

Served on the admin port only. Must not import `api`, `console`, `execution` or `request`.
"""
