"""BatchService: files and batches over gRPC. `BatchOperations` has all rules.

It must not import the routes of HTTP.
"""
