"""`slipstream chat`: a conversation in the terminal.

Must not import `fleet`, `jobs` or `top`.
"""
