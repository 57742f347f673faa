"""Segment files: format, reads, writes, recovery.

Must not import the tier above.
"""
