"""Faults that benchmarks and tests inject (disks, links, etcd), and the load during a fault."""
