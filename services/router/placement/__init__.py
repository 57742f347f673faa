"""Which workers run a request, by predicted milliseconds. Pure: no I/O, no clock.

Must not import any other package of the router.
"""
