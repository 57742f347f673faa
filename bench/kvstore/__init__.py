"""Speed of the KV store's tiers."""
