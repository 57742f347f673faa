"""The description of the HTTP API: its operations, bodies and answers as OpenAPI, and a page that shows it.

Must not import `http`, `http_server`, `jobs` or `rpc`.
"""
