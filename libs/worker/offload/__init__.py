"""Writes new blocks to the kvstore in the background.

Must not import `process`, `restore` or `lending`.
"""
