"""BatchService: files and batches over gRPC.

It has no rule of its own about them; it must not import what HTTP alone has.
"""
