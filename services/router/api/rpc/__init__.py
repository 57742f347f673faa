"""RouterService over gRPC: its methods, and its messages as requests."""
