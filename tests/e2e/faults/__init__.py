"""Faults under running streams: killed workers, broken links, disks, clocks and etcd."""
