"""Connections to workers, the streams on them, and the state that workers report.

Must not import `api`, `execution`, `request` or `admission`.
"""
