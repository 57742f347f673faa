"""The reader's side of pins: leases on blocks of peers and kvstores.

May import `engine` and `requests` only.
"""
