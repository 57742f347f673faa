"""Which requests may run now, which wait, and which are refused.

All modules but `gate` are pure. Must not import `api`, `execution`, `jobs`, `metering` or `request`.
"""
