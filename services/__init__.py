"""The five services: router, prefill, decode, kvstore, drafter. They never import each other."""
