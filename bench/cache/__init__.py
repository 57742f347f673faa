"""Hit rates of eviction policies; cost of the router's caches."""
