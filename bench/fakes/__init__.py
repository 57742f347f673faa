"""Fake workers, and a gRPC client and server on h2 that leave most of the machine to the router."""
