"""The five services: router, prefill, decode, kvstore, drafter.

Must not import `supervisor`.
"""

import os

# Else gRPC writes a line in another form for each failed TLS handshake. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
