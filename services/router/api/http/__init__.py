"""The middleware around every public HTTP handler, and the handlers that run requests.

Must not import the routes, and no API's shapes beyond the seam of `answers`.
"""
