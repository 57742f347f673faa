"""BatchService: files and batches over gRPC. `BatchOperations` has all rules.

Must not import `endpoint`, `anthropic`, `responses` or `workers_ai`.
"""
