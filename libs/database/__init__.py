"""Durable tables of the services: SQLite in one file, or PostgreSQL, chosen by URL.

Each module that stores something declares its own tables. Of libs it may import libs.common only.
"""
