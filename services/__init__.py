"""The five services: router, prefill, decode, kvstore, drafter.

Must not import `supervisor`.
"""

import os

_GIVEN = os.environ.get("GRPC_VERBOSITY", "ERROR")
# Else gRPC writes lines in another form among those of the log, such as one for each failed TLS handshake. It
# reads this when it is imported. ERROR is its own default, which the SDK sets too; INFO and DEBUG stay.
GRPC_VERBOSITY = "NONE" if _GIVEN.upper() == "ERROR" else _GIVEN
os.environ["GRPC_VERBOSITY"] = GRPC_VERBOSITY
