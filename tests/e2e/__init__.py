"""End-to-end tests: separate processes, a real etcd and real transfers."""
