"""KV across workers: kvstore nodes, the pool, lending between prefill workers, and resumed streams."""
