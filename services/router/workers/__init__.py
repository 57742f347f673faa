"""Connections to workers, the streams on them, and the state that workers report.

Must not import `admission`, `api`, `execution`, `jobs`, `metering` or `request`.
"""
