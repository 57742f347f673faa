"""Commands on any cluster, through the admin port of one of its routers.

Must not import `chat`, `jobs` or `top`.
"""
