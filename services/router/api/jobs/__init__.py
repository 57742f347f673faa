"""Jobs for clients: JobService over gRPC, and what runs the bodies of jobs.

What stores and claims them is `services.router.jobs`. Must not import `anthropic`, `batches`, `http`,
`responses` or `workers_ai`.
"""
