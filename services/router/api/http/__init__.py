"""What every public HTTP request gets around its handler, and the handlers that run requests.

Must not import the routes, and no API's shapes beyond the seam of `answers`.
"""
