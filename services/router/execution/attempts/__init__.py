"""Attempts at one request: on which workers each runs, its hedge, and the next one after a failure.

Must not import `generation`, `request_manager`, `running_request` or `api`.
"""
