"""Processes that tests start and watch: etcd, the pool master, and a wall clock that a test sets."""
