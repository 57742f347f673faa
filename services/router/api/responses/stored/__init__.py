"""Stored responses: their items in the database, and their answers, whole or as events again.

Must not import `routes`, `operations`, `anthropic` or `workers_ai`.
"""
