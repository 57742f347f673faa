"""`pytest --processes N`: one process collects all tests, and N forks of it run their files.

A fork takes a file at a time. The parent replays the reports of its forks, so that pytest prints and counts
them. Must not import libs or services.
"""
