"""BatchService: files and batches over gRPC. It has no rule of its own about them.

It must not import the routes of HTTP.
"""
