"""Workers AI's shapes of a run: its bodies, envelope, event stream and error codes.

Must not import `anthropic`, `batches`, `jobs`, `responses` or `rpc`.
"""
