"""What a local cluster consists of: its file, its flags, their checks, and the plan of its processes.

Starts no process. Must not import `cluster`, `commands` or `process`.
"""
