"""`slipstream top`: the fleet live in a terminal.

Must not import `jobs`.
"""
