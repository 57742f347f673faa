"""Load on a cluster through its public API. Must not import services."""
